"""Host microseconds of a decode step of hybrid memory: `python tests/dev/time_planning.py`.

Planning with its validation, padding into the buffers, committing; medians of many steps.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from support.qwen4_exp import tiny_config

from cachegraph.models.capacity import Capacity
from cachegraph.models.planner_specs import dims
from cachegraph.models.qwen4_exp.contract import contract, ladder, planner_specs
from cachegraph.runtime.hybrid import HybridMemory
from cachegraph.runtime.padding import Filler
from cachegraph.runtime.planners.step import pick_bucket
from cachegraph.runtime.split import UBatch

STEPS = 300


class Host:
    """The host half of an engine of one tiny config."""

    def __init__(self, context: int, sequences: int) -> None:
        config = tiny_config()
        capacity = Capacity(
            context=context + 4 * STEPS, sequences=sequences, max_step=512, rewind=4
        )
        self.contract = contract(config, capacity)
        self.specs, self.ladder = (
            planner_specs(config, capacity),
            ladder(config, capacity),
        )
        self.memory = HybridMemory(self.contract, self.specs, capacity)
        self.filler = Filler(self.contract, self.specs)
        self.buffers: dict[object, dict[str, np.ndarray]] = {}
        self.sequences = sequences

    def step(self, count: int) -> tuple[float, float, float, int]:
        """Seconds of planning, padding and committing a step, and the pools it makes."""
        seqs = range(self.sequences)
        starts = [self.memory.length(seq) for seq in seqs]
        positions = np.concatenate([start + np.arange(count) for start in starts])
        ubatch = UBatch(
            tokens=positions % 90,
            positions=positions,
            streams=tuple(seqs),
            step=count,
            source=np.arange(positions.size),
            wants_logits=np.ones(positions.size, np.bool_),
            places=np.repeat(positions[:, None], 3, axis=1),
        )
        start = time.perf_counter()
        plan = self.memory.plan(ubatch)
        planned = time.perf_counter()
        bucket = pick_bucket(self.specs, self.ladder, plan)
        sizes = dims(self.specs, bucket)
        if bucket not in self.buffers:
            self.buffers[bucket] = {
                row.name: np.empty(row.resolve(sizes), np.int64)
                for row in self.contract.host_rows
            }
        ready = time.perf_counter()
        self.filler.fill(sizes, plan, self.buffers[bucket])
        filled = time.perf_counter()
        self.memory.commit(plan)
        done = time.perf_counter()
        assert plan.pooled is not None
        made = int(plan.pooled.new_pools.size)
        return planned - start, filled - ready, done - filled, made


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    print("| sequences | context | plan us | pad us | commit us | most new pools |")
    print("| --- " * 6 + "|")
    for sequences in options.sequences:
        for context in options.contexts:
            host = Host(context, sequences)
            while host.memory.length(0) < context:
                host.step(512)
            rows = np.array([host.step(1) for _ in range(STEPS)])
            plan, pad, commit = np.median(rows[:, :3], axis=0) * 1e6
            most = int(rows[:, 3].max())
            print(
                f"| {sequences} | {context} | {plan:.0f} | {pad:.0f} | {commit:.0f} | {most} |"
            )


if __name__ == "__main__":
    main()
