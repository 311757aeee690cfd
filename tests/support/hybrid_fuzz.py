"""Random programs of sequence edits over hybrid memory, judged by cold runs and by plain lists.

A program is drawn from a seed and its number alone. After every operation lengths, tokens,
positions and reach are those of the lists; at the end every row of logits that was ever returned,
and the live rows of every sequence, are those of a cold run. Texts may hold images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.bundles import Bundles, open_engine
from support.fuzz import Operation, Score
from support.qwen4_exp import random_tensors, tiny_config

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, RowSharing
from cachegraph.models.errors import CapacityError, RewindError, StateFileError, UsageError
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig
from cachegraph.models.qwen4_exp.twin import forward
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine

MODELS = ("plain", "six", "ngrams")
SIZES = {"plain": {"index_heads": 16}, "six": {}, "ngrams": {}}
CAPACITY = Capacity(context=64, sequences=4, max_step=12, rewind=3)
COLD = Capacity(context=64, sequences=1, max_step=64, rewind=0)  # one call, other buckets
SEQUENCES, TOLERANCE, SEED = 4, 1e-5, 1
SHARES = {
    "append": 0.36,
    "fork": 0.08,
    "remove": 0.05,
    "rewind": 0.10,
    "keep": 0.03,
    "clear": 0.04,
    "save": 0.06,
    "restore": 0.06,
    "take_state": 0.06,
    "set_state": 0.06,
    "prefill": 0.07,
    "shift": 0.03,
}

Token = tuple[int, int, int, int]  # id, positions t, y and x
Text = tuple[Token, ...]
Logits = NDArray[np.float32]
Rows = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Held:
    """What a sequence holds: its text, and how many earlier states it can return to."""

    text: Text = ()
    depth: int = 0

    def after(self, tokens: Text) -> Held:
        depth = min(self.depth + len(tokens), CAPACITY.rewind)
        return Held(self.text + tokens, depth)

    def cut(self, length: int) -> Held:
        left = len(self.text) - length
        return Held(self.text[:length], max(0, self.depth - left)) if length else Held()

    @property
    def reach(self) -> list[int]:
        length = len(self.text)
        return sorted({0, *range(length - self.depth, length + 1)})


def draw(seed: int, number: int, vocab: int) -> list[Operation]:
    """The program of a number."""
    rng = np.random.default_rng([seed, number, 4])
    operations = []
    for name in rng.choice(list(SHARES), size=rng.integers(8, 22), p=list(SHARES.values())):
        numbers = tuple(rng.integers(1000, size=7).tolist())
        tokens = tuple(rng.integers(vocab, size=100).tolist())
        operations.append(Operation(str(name), numbers, tokens))
    return operations


def following(text: Text) -> int:
    """The position that comes next in a text."""
    return max(text[-1][1:]) + 1 if text else 0


def placed(text: Text, tokens: tuple[int, ...], image: int) -> Text:
    """Tokens behind a text; where `image` says so, those from one on form rows of an image."""
    found: list[Token] = []
    start, width = following(text), 1 + image % 4
    is_image = image % 3 == 0
    for number, token in enumerate(tokens):
        if is_image:
            found.append((token, start, start + number // width, start + number % width))
        else:
            found.append((token, *[start + number] * 3))
    return tuple(found)


def live_rows(engine: Engine, seq: int) -> Rows:
    """Rows of tokens, keys of complete pools, and the newest state of a sequence."""
    memory = engine._store.table
    rows = memory.stored(seq).rows
    found: Rows = {}
    layout = memory._layouts.get(seq)
    for spec in engine.manifest.contract.caches:
        array = engine._store.caches[spec.name].array
        if spec.kind is CacheKind.POOLED:
            places = layout.reps if layout is not None and rows[CacheKind.KEYS].size else []
        else:
            places = rows[spec.kind][-1:] if spec.kind.is_recurrent else rows[spec.kind]
        found[spec.name] = array[np.array(places, np.int64)].copy()
    return found


class Oracle:
    """Cold runs of texts, each in one call, remembered."""

    def __init__(self, bundle: Path) -> None:
        self.engine = open_engine(bundle)
        self._known: dict[Text, tuple[Logits, Rows]] = {}

    def run(self, text: Text) -> tuple[Logits, Rows]:
        """Logits of every token, and the rows that the sequence then has."""
        if text not in self._known:
            self.engine.clear()
            parts = np.array(text, np.int64).reshape(-1, 4)
            batch = Batch.of(parts[:, 0], parts[:, 1:], [0] * len(text), logits=True)
            logits = self.engine.decode(batch) if text else np.zeros((0, 1), np.float32)
            self._known[text] = logits, live_rows(self.engine, 0)
        return self._known[text]

    def forget(self) -> None:
        self._known.clear()


class Play:
    """One program on an engine, with its lists."""

    def __init__(self, engine: Engine, oracle: Oracle, folder: Path) -> None:
        self.engine, self.oracle = engine, oracle
        self.held = [Held()] * SEQUENCES
        self.seen: list[tuple[Text, Logits]] = []
        self.files: list[tuple[Path, dict[int, Held]]] = []
        self.states: list[tuple[bytes, bool, int, Held]] = []
        self._folder = folder
        engine.clear()

    def run(self, operation: Operation) -> None:
        getattr(self, f"_{operation.name}")(operation)
        for seq, held in enumerate(self.held):
            assert self.engine.length(seq) == len(held.text), f"length of {seq}"
            ids = tuple(token[0] for token in held.text)
            assert self.engine.tokens(seq) == ids, f"tokens of {seq}"
            places = [list(token[1:]) for token in held.text]
            assert np.asarray(self.engine.positions(seq)).tolist() == places, (
                f"places of {seq}"
            )
            reach = [p for span in self.engine.reachable(seq) for p in span]
            assert reach == held.reach, f"reach of {seq}"

    def differences(self) -> Iterator[tuple[float, Text]]:
        """How far every answer and every live row is from a cold run of its text."""
        self._settle()
        for text, logits in self.seen:
            wanted, _ = self.oracle.run(text)
            yield float(np.abs(logits - wanted[len(text) - len(logits) :]).max()), text
        for seq, held in enumerate(self.held):
            _, rows = self.oracle.run(held.text)
            ours = live_rows(self.engine, seq)
            gaps = [np.abs(ours[n] - rows[n]).max(initial=0) for n in rows if held.text]
            yield float(max(gaps, default=0.0)), held.text

    def _settle(self) -> None:
        """One more step, so that pools that edits left stale are made."""
        seq = min(range(SEQUENCES), key=lambda one: len(self.held[one].text))
        if len(self.held[seq].text) < CAPACITY.context:
            tokens = placed(self.held[seq].text, (1,), 1)
            self._decode({seq: tokens}, 0)

    def _refused(self, fault: type[Exception], call: object, *args: object) -> None:
        try:
            call(*args)  # type: ignore[operator]
        except fault:
            return
        raise AssertionError(f"{fault.__name__} was owed")

    def _append(self, operation: Operation) -> None:
        """One to four sequences in one batch, tokens of each in a row or by turns."""
        which, *sizes, image, order = operation.numbers
        seqs = [which % SEQUENCES] if which % 3 else [s for s in range(4) if which >> s & 1]
        new, start = {}, 0
        for seq in seqs:
            count = 1 + sizes[seq] % (23 if sizes[seq] % 2 else 4)
            tokens = operation.tokens[start : start + count]
            new[seq] = placed(self.held[seq].text, tokens, image + seq)
            start += count
        self._decode(new, order)

    def _decode(self, new: dict[int, Text], order: int) -> None:
        entries = [(seq, token) for seq, tokens in new.items() for token in tokens]
        if not entries:
            return
        owners = [seq for seq, _ in entries]
        if order % 2:
            turns = np.random.default_rng(order).permutation(owners).tolist()
            left = {seq: iter(tokens) for seq, tokens in new.items()}
            owners, entries = turns, [(seq, next(left[seq])) for seq in turns]
        parts = np.array([token for _, token in entries], np.int64)
        batch = Batch.of(parts[:, 0], parts[:, 1:], owners, logits=True)
        if any(len(self.held[s].text) + len(t) > CAPACITY.context for s, t in new.items()):
            self._refused(CapacityError, self.engine.decode, batch)
            return
        logits = self.engine.decode(batch)
        for seq, tokens in new.items():
            self.held[seq] = self.held[seq].after(tokens)
            mine = [i for i, owner in enumerate(owners) if owner == seq]
            self.seen.append((self.held[seq].text, logits[mine]))

    def _prefill(self, operation: Operation) -> None:
        """A beginning of what some sequence holds, as text, and new tokens."""
        which, other, share, fresh, *_ = operation.numbers
        seq = which % SEQUENCES
        begin = tuple(t[0] for t in self.held[seq if other % 4 else other % SEQUENCES].text)
        text = (
            begin[: len(begin) - share % (len(begin) + 1)] + operation.tokens[: 1 + fresh % 9]
        )
        if len(text) > CAPACITY.context:
            self._refused(CapacityError, self.engine.prefill, text, seq)
            return
        wanted = placed((), text, 1)
        held = self.held[seq].text
        common = next(
            (i for i, (a, b) in enumerate(zip(held, wanted, strict=False)) if a != b),
            min(len(held), len(wanted)),
        )
        reused = max(p for p in self.held[seq].reach if p <= min(common, len(text) - 1))
        done = self.engine.prefill(text, seq)
        assert (done.reused, done.planned) == (reused, len(text) - reused), "what is reused"
        self.held[seq] = self.held[seq].cut(reused).after(wanted[reused:])
        self.seen.append((wanted, done.logits[None]))

    def _fork(self, operation: Operation) -> None:
        source, target = (n % SEQUENCES for n in operation.numbers[:2])
        self.engine.copy(source, target)
        self.held[target] = self.held[source]

    def _remove(self, operation: Operation) -> None:
        """Positions from anywhere to the end, or a range that leaves a part behind."""
        which, first, end, *_ = operation.numbers
        seq, first = which % SEQUENCES, first % 70 - 4
        last = -1 if end % 2 else end % 70
        text = self.held[seq].text
        start = sum(token[1] < max(0, first) for token in text)
        stop = len(text) if last < 0 else sum(token[1] < last for token in text)
        if start >= stop:
            self.engine.remove(seq, first, last)
        elif stop < len(text) or start not in self.held[seq].reach:
            self._refused(RewindError, self.engine.remove, seq, first, last)
        else:
            self.engine.remove(seq, first, last)
            self.held[seq] = self.held[seq].cut(start)

    def _rewind(self, operation: Operation) -> None:
        which, choice, *_ = operation.numbers
        seq = which % SEQUENCES
        held = self.held[seq]
        if choice % 5 == 0:
            wrong = next((n for n in range(len(held.text)) if n not in held.reach), None)
            if wrong is not None:
                self._refused(RewindError, self.engine.rewind, seq, wrong)
            return
        length = held.reach[-1 - choice % len(held.reach)]
        self.engine.rewind(seq, length)
        self.held[seq] = held.cut(length)

    def _keep(self, operation: Operation) -> None:
        kept = operation.numbers[0] % SEQUENCES
        self.engine.keep(kept)
        self.held = [held if s == kept else Held() for s, held in enumerate(self.held)]

    def _clear(self, operation: Operation) -> None:
        which, how, *_ = operation.numbers
        seq = which % SEQUENCES
        if how % 3 == 0:
            self.engine.reset(seq)
        else:
            self.engine.clear(seq, data=bool(how % 2))
        self.held[seq] = Held()

    def _save(self, operation: Operation) -> None:
        seqs = [s for s in range(SEQUENCES) if operation.numbers[0] >> s & 1]
        path = self._folder / str(len(self.files))
        self.engine.save(path, seqs)
        self.files.append((path, {seq: self.held[seq] for seq in seqs}))

    def _restore(self, operation: Operation) -> None:
        which, *order = operation.numbers
        if not self.files:
            return
        path, held = self.files[which % len(self.files)]
        slots = np.random.default_rng(order).permutation(SEQUENCES).tolist()
        targets = dict(zip(held, slots, strict=False))
        assert self.engine.restore(path, targets) == targets
        for saved, slot in targets.items():
            self._restored(slot, held[saved])

    def _restored(self, seq: int, held: Held) -> None:
        """A file holds no state after none of the tokens, and needs none."""
        depth = min(held.depth, max(0, len(held.text) - 1))
        self.held[seq] = Held(held.text, depth)

    def _take_state(self, operation: Operation) -> None:
        which, partial, *_ = operation.numbers
        seq, is_partial = which % SEQUENCES, bool(partial % 2)
        data = self.engine.state(seq, partial=is_partial)
        assert self.engine.state_size(seq, partial=is_partial) == len(data)
        self.states.append((data, is_partial, seq, self.held[seq]))

    def _set_state(self, operation: Operation) -> None:
        which, other, *_ = operation.numbers
        if not self.states:
            return
        data, is_partial, seq, held = self.states[which % len(self.states)]
        if not is_partial or other % 5 == 0:
            seq = other % SEQUENCES
        if is_partial and self.held[seq].text[: len(held.text)] != held.text:
            self._refused(StateFileError, self.engine.set_state, seq, data)
            return
        assert self.engine.set_state(seq, data) == len(held.text)
        self._restored(seq, held)

    def _shift(self, operation: Operation) -> None:
        """An image stays where it is; a text moves to where it came from again."""
        which, first, end, delta, *_ = operation.numbers
        seq = which % SEQUENCES
        text = self.held[seq].text
        if any(len({t, y, x}) > 1 for _, t, y, x in text):
            self._refused(UsageError, self.engine.shift, seq, first, end, delta)
            return
        if text and not self.engine._store.table.cells.is_shared(seq):
            self.engine.shift(seq, 0, -1, delta)
            self.engine.shift(seq, 0, -1, -delta)


@dataclass
class Fuzz:
    """Engines and oracles of the models, and programs played on them."""

    root: Path
    sharing: RowSharing = RowSharing.PER_STREAM
    _pairs: dict[str, tuple[Engine, Oracle]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bundles = Bundles(self.root / "bundles")

    def play(self, seed: int, number: int, score: Score) -> None:
        """Play one program and add it to the score."""
        name = MODELS[number % len(MODELS)]
        engine, oracle = self._pair(name)
        oracle.forget()
        folder = self.root / "files"
        folder.mkdir(parents=True, exist_ok=True)
        play = Play(engine, oracle, folder)
        label = f"program {number} of seed {seed} on {name}, {self.sharing.value}"
        score.programs += 1
        for step, operation in enumerate(draw(seed, number, engine.manifest.vocab_size)):
            score.operations += 1
            try:
                play.run(operation)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                score.failures.append(f"{label}, step {step} {operation.name}: {fault}")
                return
            score.outcomes[operation.name] += 1
        for difference, text in play.differences():
            score.compared += 1
            if difference <= TOLERANCE:
                score.worst = max(score.worst, difference)
                continue
            gap = self._gap(name, text)
            where = score.near_ties if gap < TOLERANCE else score.failures
            where.append(f"{label}: {difference:.1e} after {text}, gap {gap:.1e}")

    def close(self) -> None:
        for engine, oracle in self._pairs.values():
            engine.close()
            oracle.engine.close()

    def _pair(self, name: str) -> tuple[Engine, Oracle]:
        if name not in self._pairs:
            bundles = self._bundles
            checkpoint = bundles.qwen_checkpoint(name, seed=SEED, **SIZES[name])
            hot = bundles.bundle(checkpoint, capacity=CAPACITY, raw=self.sharing)
            cold = bundles.bundle(checkpoint, capacity=COLD)
            self._pairs[name] = open_engine(hot), Oracle(cold)
        return self._pairs[name]

    def _gap(self, name: str, text: Text) -> float:
        """The narrowest cut of any top-k in the float64 twin's run of a text."""
        config: Qwen4ExpConfig = tiny_config(name, **SIZES[name])
        parts = np.array(text, np.int64)
        weights = random_tensors(config, SEED)
        return forward(config, weights, parts[:, 0], parts[:, 1:]).smallest_gap
