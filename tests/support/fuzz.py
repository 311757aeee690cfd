"""Random programs of sequence edits, judged by cold runs and by a dictionary of what is where.

A program is drawn from a seed and its number alone, so that one that failed can be played again.
After every operation lengths, tokens and reach are those of the dictionary model, and so are the
answers of accepts and what a prefill reuses; at the end every row of logits that was ever returned,
and the live rows of every sequence, are those of a cold run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from support.bundles import Bundles, largest_difference, open_engine
from support.checkpoint_model import CheckpointModel
from support.sequence_model import Label, Memory
from support.sessions import Logits, Oracle, needed_rows
from support.tiny import random_tensors, tiny_config

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, RowSharing
from cachegraph.models.deepseek_v4.twin import forward
from cachegraph.models.errors import (
    BatchError,
    CapacityError,
    ConfigError,
    RewindError,
    StateFileError,
    UsageError,
)
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.checkpoint_book import Mode
from cachegraph.runtime.engine import Engine

MODELS = ("mixed", "ratios", "hca_only")
CAPACITY = Capacity(context=64, sequences=4, max_step=12, rewind=5)
# Cold runs go in one call, through other buckets than the programs.
COLD = Capacity(context=64, sequences=1, max_step=64, rewind=0)
SEQUENCES, TOLERANCE, SEED = 4, 1e-5, 1
SHARES = {
    "append": 0.30,
    "prefill": 0.07,
    "fork": 0.07,
    "remove": 0.06,
    "rewind": 0.08,
    "keep": 0.02,
    "shift": 0.02,
    "save": 0.06,
    "restore": 0.05,
    "clear": 0.02,
    "checkpoint": 0.12,
    "accept": 0.11,
    "discard": 0.02,
}
TAKE_TOKENS = ("append", "prefill", "checkpoint")


@dataclass(frozen=True)
class Operation:
    """A name and numbers; what they mean depends on what the sequences hold by then."""

    name: str
    numbers: tuple[int, ...]
    tokens: tuple[int, ...] = ()


def draw(seed: int, number: int, vocab: int) -> list[Operation]:
    """The program of a number."""
    rng = np.random.default_rng([seed, number])
    operations = []
    for name in rng.choice(list(SHARES), size=rng.integers(6, 19), p=list(SHARES.values())):
        numbers = tuple(rng.integers(1000, size=6).tolist())
        tokens = rng.integers(vocab, size=100).tolist() if name in TAKE_TOKENS else ()
        operations.append(Operation(str(name), numbers, tuple(tokens)))
    return operations


@dataclass
class Held:
    """One sequence in the dictionary model or in a file: its text and its labelled rows."""

    text: Label = ()
    rows: dict[tuple[CacheKind, int], Label] = field(default_factory=dict)


class Books:
    """The dictionary model: which row of which stream holds what."""

    def __init__(self, name: str, capacity: Capacity) -> None:
        self.memory = Memory(tiny_config(name), capacity)
        self.texts: list[Label] = [()] * SEQUENCES
        self.checkpoint = CheckpointModel(self.memory, self.texts, CAPACITY.rewind)

    def append(self, seq: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = len(self.texts[seq])
            self.texts[seq] += (token,)
            self.memory.step(seq, self.texts[seq], before)
        self.checkpoint.note(seq, tokens)

    def clear(self, seq: int) -> None:
        self.checkpoint.void(seq)
        self.texts[seq] = ()
        self.memory.forget(seq)

    def cut(self, seq: int, position: int) -> None:
        if position == 0:
            self.clear(seq)
        self.checkpoint.void(seq)
        self.texts[seq] = self.texts[seq][:position]

    def take(self, seq: int) -> Held:
        """What a copy or a file of a sequence holds: rows of its text, none of rejected tokens."""
        text, held = self.texts[seq], {}
        for kind, rows in self.memory.rows.items():
            size = self.memory.sizes[kind]
            for index in range(size):
                label = rows.get(seq * size + index)
                if label is not None and text[: len(label)] == label:
                    held[kind, index] = label
        return Held(text, held)

    def put(self, seq: int, held: Held) -> None:
        self.clear(seq)
        self.texts[seq] = held.text
        for (kind, index), label in held.rows.items():
            self.memory.rows[kind][seq * self.memory.sizes[kind] + index] = label

    def reach(self, seq: int) -> list[int]:
        text = self.texts[seq]
        return [p for p in range(len(text) + 1) if self.memory.is_safe(seq, text, p)]


class Play:
    """One program on an engine, with its books."""

    def __init__(self, engine: Engine, oracle: Oracle, name: str, folder: Path) -> None:
        self.engine, self.oracle = engine, oracle
        self.books = Books(name, engine.manifest.capacity)
        self.seen: list[tuple[Label, Logits]] = []  # a text, and logits of its last tokens
        self.files: list[tuple[Path, dict[int, Held]]] = []
        self.outcomes: Counter[str] = Counter()
        self._folder = folder
        engine.clear()
        engine.checkpoints.release()

    def run(self, operation: Operation) -> None:
        getattr(self, f"_{operation.name}")(operation)
        for seq, text in enumerate(self.books.texts):
            assert self.engine.length(seq) == len(text), f"length of {seq}"
            assert self.engine.tokens(seq) == text, f"tokens of {seq}"
            reach = [p for span in self.engine.reachable(seq) for p in span]
            assert reach == self.books.reach(seq), f"reach of {seq}"
        assert self.engine.checkpoints.is_saved == bool(self.books.checkpoint.saved)

    def _refused(self, fault: type[Exception], call: object, *args: object) -> None:
        try:
            call(*args)  # type: ignore[operator]
        except fault:
            return
        raise AssertionError(f"{fault.__name__} was owed")

    def _append(self, operation: Operation) -> None:
        """One to four sequences in one batch, tokens of each in a row or by turns."""
        which, *sizes, order = operation.numbers
        seqs = [which % SEQUENCES] if which % 3 else [s for s in range(4) if which >> s & 1]
        counts = {seq: 1 + sizes[seq] % (23 if sizes[seq] % 2 else 4) for seq in seqs}
        self._decode(counts, operation.tokens, order)

    def _decode(self, counts: Mapping[int, int], source: Sequence[int], order: int) -> bool:
        """The next tokens of some sequences in one batch; whether there was room."""
        owners = [seq for seq, count in counts.items() for _ in range(count)]
        if order % 2:
            owners = np.random.default_rng(order).permutation(owners).tolist()
        tokens = list(source[: len(owners)])
        if not owners:
            return False
        starts = {seq: len(text) for seq, text in enumerate(self.books.texts)}
        batch = Batch.of(tokens, None, owners, starts=starts, logits=[True] * len(owners))
        if any(starts[seq] + count > CAPACITY.context for seq, count in counts.items()):
            self._refused(CapacityError, self.engine.decode, batch)
            return False
        logits = self.engine.decode(batch)
        for seq in counts:
            mine = [i for i, owner in enumerate(owners) if owner == seq]
            self.books.append(seq, [tokens[i] for i in mine])
            self.seen.append((self.books.texts[seq], logits[mine]))
        return True

    def _fork(self, operation: Operation) -> None:
        source, target = (n % SEQUENCES for n in operation.numbers[:2])
        held = self.books.take(source)
        moved = self.engine.copy(source, target)
        if source == target:
            assert moved == 0
            return
        self.books.put(target, held)
        widths = {}
        for spec in self.engine.manifest.contract.caches:
            widths[spec.kind] = widths.get(spec.kind, 0) + spec.width * 4
        is_shared = self.engine.manifest.layouts[CacheKind.RAW].sharing is RowSharing.UNIFIED
        left = {CacheKind.RAW} if is_shared else set()
        bytes_of = sum(widths[kind] for kind, _ in held.rows if kind not in left)
        assert moved == bytes_of, "bytes of a copy"

    def _remove(self, operation: Operation) -> None:
        """Any range, of one sequence or of all."""
        which, first, end, *_ = operation.numbers
        seq = -1 if which % 10 == 0 else which % SEQUENCES
        self._take_back(seq, first % 70 - 4, -1 if end % 2 else end % 70)

    def _rewind(self, operation: Operation) -> None:
        """Back to a position that can be reached, near the end mostly."""
        which, choice, *_ = operation.numbers
        seq = which % SEQUENCES
        reach = self.books.reach(seq)
        position = reach[-1 - choice % min(len(reach), 7 if choice % 9 else 99)]
        self._take_back(seq, position, -1)
        assert self.engine.length(seq) == position

    def _take_back(self, seq: int, first: int, end: int) -> None:
        cuts = {}
        for one in range(SEQUENCES) if seq == -1 else [seq]:
            length = len(self.books.texts[one])
            start, stop = max(0, first), length if end < 0 else min(end, length)
            if start < stop:
                if stop < length or start not in self.books.reach(one):
                    self._refused(RewindError, self.engine.remove, seq, first, end)
                    return
                cuts[one] = start
        self.engine.remove(seq, first, end)
        for one, position in cuts.items():
            self.books.cut(one, position)

    def _keep(self, operation: Operation) -> None:
        kept = operation.numbers[0] % SEQUENCES
        self.engine.keep(kept)
        for seq in set(range(SEQUENCES)) - {kept}:
            self.books.clear(seq)

    def _shift(self, operation: Operation) -> None:
        seq, first, end, delta, *_ = operation.numbers
        edit = self.engine.divide if delta % 5 == 0 else self.engine.shift
        self._refused(UsageError, edit, seq % SEQUENCES, first, end, delta)

    def _save(self, operation: Operation) -> None:
        which, *_ = operation.numbers
        seqs = [s for s in range(SEQUENCES) if which >> s & 1]
        path = self._folder / str(len(self.files))
        self.engine.save(path, seqs)
        self.files.append((path, {seq: self.books.take(seq) for seq in seqs}))

    def _restore(self, operation: Operation) -> None:
        which, wrong, *order = operation.numbers
        if not self.files:
            return
        path, held = self.files[which % len(self.files)]
        slots = np.random.default_rng(order).permutation(SEQUENCES).tolist()
        targets = dict(zip(held, slots, strict=False))
        if wrong % 11 == 0:
            absent = {s: s for s in range(SEQUENCES) if s not in held}
            if absent:
                self._refused(StateFileError, self.engine.restore, path, absent)
            return
        assert self.engine.restore(path, targets) == targets
        for saved, slot in targets.items():
            self.books.put(slot, held[saved])

    def _clear(self, operation: Operation) -> None:
        which, data, *_ = operation.numbers
        seq = -1 if which % 10 == 0 else which % SEQUENCES
        if seq >= 0 and data % 5 == 0:
            self.engine.reset(seq)
        else:
            self.engine.clear(seq, data=bool(data % 2))
        for one in range(SEQUENCES) if seq == -1 else [seq]:
            self.books.clear(one)

    def _prefill(self, operation: Operation) -> None:
        """A beginning of what some sequence holds, and new tokens."""
        which, other, share, fresh, *_ = operation.numbers
        seq, source = which % SEQUENCES, other % SEQUENCES
        begin = self.books.texts[seq if other % 5 else source]
        keep = len(begin) - share % min(len(begin) + 1, 7 if share % 3 else 99)
        text = begin[:keep] + operation.tokens[: fresh % 9]
        if not 0 < len(text) <= CAPACITY.context:
            fault = CapacityError if text else BatchError
            self._refused(fault, self.engine.prefill, text, seq)
            return
        held = self.books.texts[seq]
        most = len(text) - 1
        common = next(
            (i for i, (a, b) in enumerate(zip(held, text, strict=False)) if a != b), most
        )
        reused = max(p for p in self.books.reach(seq) if p <= min(common, most))
        done = self.engine.prefill(text, seq)
        assert (done.reused, done.planned) == (reused, len(text) - reused), "what is reused"
        if reused < len(held):
            self.books.cut(seq, reused)
        self.books.append(seq, text[reused:])
        self.outcomes["prefill, reused" if reused else "prefill, cold"] += 1
        self.seen.append((text, done.logits[None]))

    def _checkpoint(self, operation: Operation) -> None:
        """Save in some mode, decode a few tokens as drafts are, keep unequal counts of them.

        A live save of another mode refuses the new one and is discarded.
        """
        which, count, beyond, *sizes = operation.numbers
        checkpoints, model = self.engine.checkpoints, self.books.checkpoint
        mode = list(Mode)[which % 4]
        limit = checkpoints.limit(mode)
        if beyond % 7 == 0:
            self._refused(ConfigError, checkpoints.prepare, mode, limit + 1)
        count = 1 + count % limit
        if model.saved and mode != model.mode:
            self._refused(UsageError, checkpoints.prepare, mode, count)
            self._discard(operation)
        checkpoints.prepare(mode, count)
        checkpoints.save()
        model.prepare(mode, count)
        model.save()
        counts = {s: 1 + sizes[s % 3] % (6 + s) for s in range(SEQUENCES) if beyond >> s & 1}
        if self._decode(counts, operation.tokens, beyond):
            for seq, decoded in counts.items():
                if sizes[0] % 5:
                    self._keep_of(seq, sizes[1] % (decoded + 1), is_replayed=True)

    def _accept(self, operation: Operation) -> None:
        """Any count of a sequence, one too many at most; what is to be replayed mostly is."""
        which, count, replays, *_ = operation.numbers
        saved = self.books.checkpoint.saved
        able = [seq for seq, one in saved.items() if one.tokens and not one.is_void]
        seq = able[which % len(able)] if able and which % 6 else which % SEQUENCES
        most = len(saved[seq].tokens) if seq in saved else 0
        self._keep_of(seq, count % (most + 2), is_replayed=replays % 5 > 0)

    def _keep_of(self, seq: int, count: int, *, is_replayed: bool) -> None:
        """Accept so many tokens of a sequence, and decode again what the mode asks for."""
        model = self.books.checkpoint
        one = model.saved.get(seq)
        is_there = one is not None and not one.is_void and count <= len(one.tokens)
        again = one.tokens[:count] if one is not None else []
        is_all = one is not None and count == one.standing
        wanted = model.accept(seq, count)
        if is_there:
            kept = "nothing to do" if is_all else wanted.split(" ")[0] or "refused"
            self.outcomes[f"accept in {model.mode}, {kept}"] += 1
        if not wanted:
            self._refused(RewindError, self.engine.checkpoints.accept, seq, count)
            return
        assert str(self.engine.checkpoints.accept(seq, count)) == wanted, "answer of an accept"
        if wanted != "direct" and is_replayed:
            self._decode({seq: count}, again, order=0)

    def _discard(self, _: Operation) -> None:
        self.engine.checkpoints.discard()
        self.books.checkpoint.saved.clear()

    def differences(self) -> Iterator[tuple[float, Label]]:
        """How far every answer and every live row is from a cold run of its text."""
        longest: dict[Label, Label] = {}  # a text -> a longer one that was run too
        for text, _ in sorted(self.seen, key=lambda entry: -len(entry[0])):
            for end in range(len(text) + 1):
                longest.setdefault(text[:end], text)
        for text, logits in self.seen:
            wanted, _ = self.oracle.run(longest[text])
            rows = wanted[len(text) - len(logits) : len(text)]
            yield float(np.abs(logits - rows).max()), text
        for seq, text in enumerate(self.books.texts):
            _, rows = self.oracle.run(text)
            yield largest_difference(needed_rows(self.engine, seq), rows), text


@dataclass
class Score:
    """What a run of programs came to.

    near_ties: differences where no equality is owed. outcomes: how often prefills and accepts of
    tokens that were there went which way.
    """

    programs: int = 0
    operations: int = 0
    compared: int = 0
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


class Fuzz:
    """Engines and oracles of the models, and programs played on them.

    pinned: first positions that every later token sees. raw: how raw rows are owned.
    """

    def __init__(
        self, root: Path, *, pinned: int = 0, raw: RowSharing = RowSharing.PER_STREAM
    ) -> None:
        self._root, self._pinned, self._raw = root, pinned, raw
        self._bundles = Bundles(root / "bundles")
        self._pairs: dict[str, tuple[Engine, Oracle]] = {}

    def play(self, seed: int, number: int, score: Score) -> None:
        """Play one program and add it to the score."""
        name = MODELS[number % len(MODELS)]
        engine, oracle = self._pair(name)
        oracle.forget()
        folder = self._root / "files"
        folder.mkdir(parents=True, exist_ok=True)
        play = Play(engine, oracle, name, folder)
        program = draw(seed, number, engine.manifest.vocab_size)
        label = f"program {number} of seed {seed} on {name}"
        score.programs += 1
        for step, operation in enumerate(program):
            score.operations += 1
            try:
                play.run(operation)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                score.failures.append(f"{label}, step {step} {operation.name}: {fault}")
                return
        score.outcomes += play.outcomes
        for difference, text in play.differences():
            score.compared += 1
            if not difference <= TOLERANCE:
                gap = self._gap(name, text)
                where = score.near_ties if gap < TOLERANCE else score.failures
                where.append(f"{label}: {difference:.1e} after {text}, gap {gap:.1e}")
            else:
                score.worst = max(score.worst, difference)

    def close(self) -> None:
        for engine, oracle in self._pairs.values():
            engine.close()
            oracle.engine.close()

    def _pair(self, name: str) -> tuple[Engine, Oracle]:
        if name not in self._pairs:
            checkpoint = self._bundles.checkpoint(name, seed=SEED)
            hot, cold = (replace(size, pinned=self._pinned) for size in (CAPACITY, COLD))
            engine = open_engine(self._bundles.bundle(checkpoint, capacity=hot, raw=self._raw))
            self._pairs[name] = (
                engine,
                Oracle(self._bundles.bundle(checkpoint, capacity=cold)),
            )
        return self._pairs[name]

    def _gap(self, name: str, text: Label) -> float:
        """The narrowest cut of any top-k in the float64 twin's run of a text."""
        config = tiny_config(name)
        return forward(config, random_tensors(config, SEED), text, self._pinned).smallest_gap
