"""A host without a graph: the whole host path of a tiny model, driven step by step by tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from support.plan_model import POISON, PlanModel, Token

from cachegraph.models.buckets import Bucket
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind, Rope
from cachegraph.models.deepseek_v4.contract import contract, ladder, planner_specs
from cachegraph.models.planner_specs import dims
from cachegraph.runtime.batch import Batch, check_batch
from cachegraph.runtime.cells import CellTable
from cachegraph.runtime.padding import Filler
from cachegraph.runtime.planners.step import StepPlan, StepSizes, pick_bucket, plan_step
from cachegraph.runtime.split import UBatch, split_batch

VOCAB = 1000


def config(
    *,
    window: int = 5,
    csa_ratio: int = 3,
    hca_ratio: int = 7,
    layers: Sequence[LayerKind] = tuple(LayerKind),
) -> DeepseekV4Config:
    """A config whose sizes matter to the host only."""
    return DeepseekV4Config(
        vocab_size=VOCAB,
        hidden_size=24,
        layer_kinds=tuple(layers),
        num_hash_layers=0,
        num_heads=2,
        head_dim=10,
        rope_head_dim=6,
        q_lora_rank=9,
        o_groups=2,
        o_lora_rank=7,
        sliding_window=window,
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        index_heads=3,
        index_head_dim=8,
        index_topk=2,
        num_experts=5,
        experts_per_token=2,
        expert_size=11,
        shared_expert_size=13,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=3,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_main=Rope(theta=1e4),
        rope_compress=Rope(theta=1e5),
        max_position=4096,
    )


class World:
    """Host state of one engine, and the label model that judges every step."""

    def __init__(self, model: DeepseekV4Config, capacity: Capacity) -> None:
        self.capacity = capacity
        self.contract = contract(model, capacity)
        self.specs = planner_specs(model, capacity)
        self.ladder = ladder(model, capacity)
        self.sizes = StepSizes.of(self.specs, self.contract)
        self.filler = Filler(self.contract, self.specs)
        self.cells = CellTable(self.contract.layout(CacheKind.RAW), self.specs.raw)
        ratios = {c.kind.value: (c.ratio, c.overlap) for c in self.specs.compressors}
        self.model = PlanModel(self.contract, model.sliding_window, ratios, capacity.pinned)
        self.sent: dict[tuple[int, int], int] = {}

    def check(self, batch: Batch) -> None:
        check_batch(
            batch,
            vocab_size=VOCAB,
            context=self.capacity.context,
            sequences=self.capacity.sequences,
            next_positions=self.cells.next_positions(),
        )

    def decode(self, counts: Mapping[int, int], order: Sequence[int] | None = None) -> Batch:
        """Send so many new tokens of each sequence, interleaved as `order` says; judge all."""
        owners = list(order or [seq for seq, count in counts.items() for _ in range(count)])
        tokens = [(7 * i + 13 * len(self.sent) + 3) % VOCAB for i in range(len(owners))]
        batch = Batch.of(tokens, None, owners, starts=self.cells.next_positions())
        self.check(batch)
        parts = split_batch(batch, self.ladder)
        self.cells.check_room(parts)
        covered = np.sort(np.concatenate([part.source for part in parts]))
        assert covered.tolist() == list(range(len(batch)))
        for part in parts:
            self.step(part)
        return batch

    def step(self, part: UBatch) -> None:
        plan = plan_step(self.sizes, self.cells, part)
        self.judge(plan, pick_bucket(self.specs, self.ladder, plan))
        self.cells.commit(plan.reservation)

    def judge(self, plan: StepPlan, bucket: Bucket) -> dict[str, np.ndarray]:
        """Fill poisoned buffers of a bucket, play them, and return them."""
        sizes = dims(self.specs, bucket)
        buffers = {
            row.name: np.full(row.resolve(sizes), POISON, np.int64)
            for row in self.contract.host_rows
        }
        self.filler.fill(sizes, plan, buffers)
        part = plan.ubatch
        tokens = [
            Token(
                row=stream * bucket.step + i,
                seq=seq,
                pos=int(part.positions[stream * part.step + i]),
                token=int(part.tokens[stream * part.step + i]),
            )
            for stream, seq in enumerate(part.streams)
            for i in range(part.step)
        ]
        self.model.play(buffers, tokens, (bucket.streams, bucket.step))
        self._judge_out_rows(plan, bucket, buffers["out_rows"])
        return buffers

    @staticmethod
    def _judge_out_rows(plan: StepPlan, bucket: Bucket, out_rows: np.ndarray) -> None:
        wanted = [
            stream * bucket.step + i
            for stream in range(len(plan.ubatch.streams))
            for i in range(plan.ubatch.step)
            if plan.ubatch.wants_logits[stream * plan.ubatch.step + i]
        ]
        assert out_rows[: len(wanted)].tolist() == wanted
        assert set(out_rows[len(wanted) :].tolist()) <= {wanted[-1] if wanted else 0}
