"""From logits to tokens wholly on the device, without waiting for it.

For: the runner on an accelerator. Does not know: models, stop rules, when its work is done. Invariants: the definitions
are those of ../sampler.py, and so are the tokens, but where a float's last bits decide (see `DeviceSampler`); a sample
depends on its logits, its row's request and its row's tokens alone, bit by bit; what rows ask for is on the device
before the first sample that needs it, also when a step between was given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton

from ..infer_request import InferRequest, SamplingParams, TokenLogprobs
from ..sampling.logit_edits import RowEdits, row_edits
from ..step import BROKEN_LOGITS, NO_TOKEN, Int32Array, SampledTokens
from .kernels import limited_sampling, logit_edits, logprobs, sampling
from .kernels.logits import BLOCK
from .kernels.ranking import CANDIDATES, LOWEST_KEY
from .kernels.sampling_rows import NUM_WORDS, RECORD

# As vLLM: below this a temperature means greedy.
_GREEDY_TEMPERATURE = 1e-5
# A tile of vocabulary for one program that only copies or sums up.
_BLOCKS_AT_ONCE = sampling.BLOCKS_AT_ONCE


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Of each sample: asked int32 [samples], how many of the most likely its row wants (-1: no logprobs at all, and
    then nothing else holds); its token's logprob float32 and rank int32 [samples]; the most likely tokens, int32 ids
    and float32 logprobs [samples, most]."""

    asked: torch.Tensor
    own: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """token_ids int32 [samples]: NO_TOKEN where logits are not finite, and for padding."""

    token_ids: torch.Tensor
    logprobs: DeviceLogprobs | None = None

    def tensors(self) -> list[torch.Tensor]:
        """What the host needs of them: in the order of HostSamples.of."""
        found = self.logprobs
        if found is None:
            return [self.token_ids]
        return [self.token_ids, found.asked, found.own, found.ranks, found.top_ids, found.top]


@dataclass(frozen=True, slots=True)
class HostSamples:
    """DeviceSamples, copied. logprobs: asked, own, ranks, top_ids, top."""

    token_ids: Int32Array
    logprobs: tuple[npt.NDArray[np.generic], ...] = ()

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> HostSamples:
        token_ids, *logprobs = (tensor.numpy() for tensor in tensors)
        return HostSamples(token_ids, tuple(logprobs))


@dataclass(slots=True, eq=False)
class _Changes:
    """What the device must be told before it samples. rows: whose records; records: int64 [rows, 1 + words], the row's
    number first; edits: the shared lists of ids and values, int32 [2, n], if they changed."""

    rows: set[int]
    records: torch.Tensor | None
    edits: torch.Tensor | None
    sent: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class _Features:
    """What any row asks for beyond tokens from the whole distribution. num_logprobs: the most of any row, -1: none."""

    num_edited: int
    limited: bool
    num_logprobs: int


class DeviceSampler:
    """Owns the sampling parameters of each row, on the host and on the device.

    Tokens are those of `Sampler` for the same logits, seeds and positions: uniform numbers, edits, divisions by the
    temperature, the order of equal logits and top_k are the same bit by bit. Weights are float32 exponentials (the
    device's may differ from the CPU's in the last bits) and are summed in float64 in another order: where a draw, or
    the end of top_p or min_p, falls within some 1e-6 of a border between two tokens, either may be chosen. On one
    device the same logits give the same token whatever else is sampled; what neighbours ask for may change which
    build of a kernel runs, and with it float64 sums in their last bit, and nothing else.

    A step in which no row asks for limits, edits or logprobs is two launches of a shape that follows from the number of
    samples alone (`is_plain`), and can be captured after `upload`.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device | str
    ) -> None:
        """Raises torch.OutOfMemoryError."""
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = torch.device(device)
        self._rows = np.zeros(max_num_seqs, RECORD)
        self._rows["top_p"], self._rows["num_logprobs"], self._rows["repetition_penalty"] = 1.0, -1, 1.0
        self._edits: dict[int, RowEdits] = {}
        self._dirty: set[int] = set(range(max_num_seqs))
        self._unused = True
        self._unsent: list[_Changes] = []
        self._edits_changed = True
        self._limited: set[int] = set()
        self._logprob_rows: set[int] = set()
        self._on_device = _DeviceState(max_num_seqs, vocab_size, self._device)

    def add_row(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming the field, its value and what was expected."""
        wants = request.sampling
        if wants.bad_words:  # the tokens before are not known on the host when a step is launched
            raise ValueError("'bad_words' holds a word of several tokens, expected words of one token on a GPU")
        edits = row_edits(request, self._vocab_size, self._eos_token_ids)
        if wants.logprobs is not None and not 0 <= wants.logprobs <= self._vocab_size:
            raise ValueError(f"'logprobs' is {wants.logprobs}, expected 0 to {self._vocab_size}")
        self.remove_row(row)
        self._unused = False
        record = self._rows[row]
        greedy = wants.temperature < _GREEDY_TEMPERATURE
        record["temperature"] = 0.0 if greedy else np.float32(wants.temperature)
        record["seed"] = wants.seed & 0xFFFFFFFFFFFFFFFF
        record["top_k"] = max(wants.top_k, 0) if wants.top_k < self._vocab_size else 0
        record["top_p"], record["min_p"] = wants.top_p, wants.min_p
        record["num_logprobs"] = -1 if wants.logprobs is None else wants.logprobs
        if not greedy and (record["top_k"] > 0 or wants.top_p < 1.0 or wants.min_p > 0.0):
            self._limited.add(row)
        if wants.logprobs is not None:
            self._logprob_rows.add(row)
        if edits is not None:
            self._set_edits(row, edits)
        self._dirty.add(row)

    def remove_row(self, row: int) -> None:
        self._limited.discard(row)
        self._logprob_rows.discard(row)
        self._edits.pop(row, None)
        record = self._rows[row]
        record["temperature"], record["num_logprobs"], record["has_edits"] = 0.0, -1, 0
        self._dirty.add(row)

    def _set_edits(self, row: int, edits: RowEdits) -> None:
        self._edits[row] = edits
        record = self._rows[row]
        record["has_edits"], record["min_tokens"] = 1, edits.min_tokens
        record["repetition_penalty"] = np.float32(edits.repetition_penalty)
        record["frequency_penalty"], record["presence_penalty"] = edits.frequency_penalty, edits.presence_penalty
        self._edits_changed = True

    @property
    def is_plain(self) -> bool:
        """Whether no row asks for more than a token from the whole distribution."""
        return not (self._edits or self._limited or self._logprob_rows)

    def prepare(self) -> PreparedSampling:
        """Reads all that the next `sample` needs of the host. To be given up, or used once; the next step's may be
        prepared before this one's is used."""
        features = _Features(
            len(self._edits),
            bool(self._limited),
            max((int(self._rows["num_logprobs"][row]) for row in self._logprob_rows), default=-1),
        )
        return PreparedSampling(self._on_device, self._changes(), features)

    @property
    def is_unused(self) -> bool:
        """Whether no row was ever taken."""
        return self._unused

    def compile(self, logits: torch.Tensor, token_table: torch.Tensor, num_prompt_tokens: torch.Tensor) -> None:
        """Device work: samples once in every way while no row is taken yet, so that no request waits for a compiler,
        and memory for as many samples as these was there once. Arguments as of `sample`."""
        rows = torch.arange(len(logits), dtype=torch.int32, device=self._device)
        ways = SamplingParams(), SamplingParams(top_p=0.5, logprobs=1), SamplingParams(top_p=0.5, presence_penalty=1.0)
        for way in ways:
            for row in range(len(logits)):
                self.add_row(row, InferRequest(request_id="", prompt_token_ids=(), sampling=way))
            self.sample(logits, rows, torch.ones_like(rows), token_table, num_prompt_tokens)
        for row in range(len(logits)):
            self.remove_row(row)

    def upload(self) -> None:
        """Device work: tells what rows ask for, if anything changed."""
        self.prepare().upload()

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_table: torch.Tensor,
        num_prompt_tokens: torch.Tensor,
    ) -> DeviceSamples:
        """Device work: the token at each (row, position) from logits [samples, vocab_size or more], in any float type,
        left unchanged. rows and positions int32 [samples], a row at most once but for padding, which comes last (row 0,
        or a negative one: then its token is NO_TOKEN). token_table int32 [max_num_seqs, max_model_len] and
        num_prompt_tokens int32 [max_num_seqs]: as of RowTable."""
        return self.prepare().sample(logits, rows, positions, token_table, num_prompt_tokens)

    def result(self, rows: Int32Array, positions: Int32Array, samples: HostSamples) -> SampledTokens:
        """What the samples of a step were, once they are on the host. Of a row that is there several times, the first
        of its broken samples is the row's error if no sample of it comes before."""
        first = np.zeros(len(rows), np.bool_)
        first[np.unique(rows, return_index=True)[1]] = True
        broken = (samples.token_ids == NO_TOKEN) & first
        errors = {int(row): BROKEN_LOGITS for row in rows[broken]}
        if not samples.logprobs:
            return SampledTokens(samples.token_ids, errors=errors)
        asked, own, ranks, top_ids, top = (array.tolist() for array in samples.logprobs)
        found: dict[int, list[TokenLogprobs]] = {}
        for i, (row, token_id) in enumerate(zip(rows.tolist(), samples.token_ids.tolist(), strict=True)):
            if asked[i] < 0 or row in errors:
                continue
            likeliest = tuple(zip(top_ids[i][: asked[i]], top[i][: asked[i]], strict=True))
            found.setdefault(row, []).append(TokenLogprobs(token_id, own[i], ranks[i], likeliest))
        return SampledTokens(samples.token_ids, found, errors)

    def _changes(self) -> _Changes:
        for given_up in self._unsent:
            if not given_up.sent:
                self._dirty |= given_up.rows
                self._edits_changed |= given_up.edits is not None
        edits = self._edit_lists() if self._edits_changed else None
        rows = sorted(self._dirty)
        records = None
        if rows:
            words = self._rows[rows].view(np.int64).reshape(len(rows), NUM_WORDS)
            records = self._staged(np.concatenate((np.array(rows, np.int64)[:, None], words), axis=1))
        changes = _Changes(set(rows), records, edits)
        self._unsent = [changes] if rows or edits is not None else []
        self._dirty.clear()
        self._edits_changed = False
        return changes

    def _edit_lists(self) -> torch.Tensor | None:
        """The biases and stops of all rows, one after the other; writes where each row's are into its record."""
        ids: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        values: list[npt.NDArray[np.float32]] = [np.zeros(1, np.float32)]
        end = 1
        for row, edits in self._edits.items():
            record = self._rows[row]
            for name, part, numbers in (
                ("bias", edits.bias_ids, edits.bias_values),
                ("stop", edits.stop_ids, np.zeros(len(edits.stop_ids), np.float32)),
            ):
                record[f"{name}_begin"], record[f"{name}_end"] = end, end + len(part)
                ids.append(part)
                values.append(numbers)
                end += len(part)
            self._dirty.add(row)
        return self._staged(np.stack((np.concatenate(ids).astype(np.int32), np.concatenate(values).view(np.int32))))

    def _staged(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Host memory that is copied without waiting; torch keeps it until the copy is done."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


class _DeviceState:
    """What lies on the device: the records, and memory for copies of logits while any row asks for edits."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.max_num_seqs, self.vocab_size, self.device = max_num_seqs, vocab_size, device
        self.records = torch.zeros((max_num_seqs, NUM_WORDS), dtype=torch.int64, device=device)
        self.edits = torch.zeros((2, 1), dtype=torch.int32, device=device)
        self._copies = torch.empty((0, vocab_size), device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def copies(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for changed logits, float32 [count, vocab_size], and for counts of tokens, all zero, int32."""
        if len(self._copies) < count:
            room = triton.next_power_of_2(count)
            self._copies = torch.empty((room, self.vocab_size), device=self.device)
            self._counts = torch.zeros((room, self.vocab_size), dtype=torch.int32, device=self.device)
        return self._copies[:count], self._counts[:count]

    def forget_copies(self) -> None:
        if len(self._copies):
            self._copies, self._counts = self._copies[:0].clone(), self._counts[:0].clone()


class PreparedSampling:
    """One step's sampling, with all it needs of the host."""

    def __init__(self, state: _DeviceState, changes: _Changes, features: _Features) -> None:
        self._state, self._changes, self._features = state, changes, features

    def upload(self) -> None:
        """Device work."""
        state, changes = self._state, self._changes
        if changes.edits is not None:
            state.edits = changes.edits.to(state.device, non_blocking=True)
        if changes.records is not None:
            records = changes.records.to(state.device, non_blocking=True)
            state.records.index_copy_(0, records[:, 0], records[:, 1:])
        changes.sent = True

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_table: torch.Tensor,
        num_prompt_tokens: torch.Tensor,
    ) -> DeviceSamples:
        """As DeviceSampler.sample."""
        self.upload()
        if not len(rows):
            return DeviceSamples(torch.empty(0, dtype=torch.int32, device=logits.device))
        step = _Step(self._state, self._features, logits, rows, positions)
        if self._features.num_edited:
            step.edit(token_table, num_prompt_tokens)
        else:
            self._state.forget_copies()
        step.summarise()
        step.choose()
        if self._features.limited:
            step.draw_limited()
        found = step.logprobs() if self._features.num_logprobs >= 0 else None
        return DeviceSamples(step.token_ids, found)


class _Step:
    """The launches of one step, and the memory between them."""

    def __init__(
        self,
        state: _DeviceState,
        features: _Features,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._state, self._features = state, features
        self._logits, self._stride = logits, logits.stride(0)
        self._rows, self._positions = rows, positions
        self._num_samples, self._vocab_size = len(rows), state.vocab_size
        self._num_blocks = triton.cdiv(self._vocab_size, BLOCK.value)
        self._padded = triton.next_power_of_2(self._num_blocks)
        self._shift = self._vocab_size.bit_length()
        self._edited = features.num_edited > 0
        self._slots, self._copies = rows, logits  # read by nobody, unless there are edits
        summaries = (self._num_samples + features.num_edited, self._num_blocks)
        self._peaks = self._new(summaries, torch.float32)
        self._masses = self._new(summaries, torch.float64)
        self._unit_masses = self._new(summaries, torch.float64) if features.num_logprobs >= 0 else self._masses
        self.token_ids = self._new((self._num_samples,), torch.int32)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._logits.device)

    def edit(self, token_table: torch.Tensor, num_prompt_tokens: torch.Tensor) -> None:
        """Copies the logits of rows with edits, and changes the copies."""
        count = self._features.num_edited
        self._copies, counts = self._state.copies(count)
        self._slots = self._new((self._num_samples,), torch.int32)
        logit_edits.slots_kernel[(1,)](
            self._rows, self._state.records, self._slots, self._num_samples, count,
            SAMPLES_PADDED=triton.next_power_of_2(max(self._num_samples, len(self._state.records))),
        )  # fmt: skip
        logit_edits.copy_kernel[self._tiles()](
            self._logits, self._stride, self._slots, self._copies, self._vocab_size, BLOCKS=_BLOCKS_AT_ONCE
        )
        ids, values = self._state.edits[0], self._state.edits[1].view(torch.float32)
        logit_edits.edit_kernel[(self._num_samples,)](
            self._rows, self._positions, self._state.records, self._slots, self._copies, counts, ids, values,
            token_table, token_table.stride(0), num_prompt_tokens, self._vocab_size,
        )  # fmt: skip

    def summarise(self) -> None:
        """Of all samples as the model gave them, and of those that were changed."""
        for edited in (False, True)[: 1 + self._edited]:
            sampling.summarise_kernel[self._tiles()](
                self._logits, self._stride, self._copies, self._slots, self._rows, self._state.records,
                self._peaks, self._masses, self._unit_masses, self._vocab_size, self._num_blocks, self._num_samples,
                BLOCKS=_BLOCKS_AT_ONCE, EDITED=edited,
                UNIT_MASSES=self._features.num_logprobs >= 0 and not edited, num_warps=8,
            )  # fmt: skip

    def choose(self) -> None:
        sampling.choose_kernel[(self._num_samples,)](
            self._logits, self._stride, self._copies, self._slots, self._rows, self._positions, self._state.records,
            self._peaks, self._masses, self.token_ids, self._vocab_size, self._num_blocks, self._num_samples,
            BLOCKS_PADDED=self._padded, EDITED=self._edited,
        )  # fmt: skip

    def draw_limited(self) -> None:
        limited_sampling.draw_limited_kernel[(self._num_samples,)](
            self._logits, self._stride, self._copies, self._slots, self._rows, self._positions, self._state.records,
            self._peaks, self._masses, *self._scratch(), self.token_ids,
            self._vocab_size, self._num_blocks, self._num_samples,
            BLOCKS_PADDED=self._padded, SHIFT=self._shift, EDITED=self._edited, num_warps=16,
        )  # fmt: skip

    def logprobs(self) -> DeviceLogprobs:
        most, samples = self._features.num_logprobs, self._num_samples
        # What the collected keys have no room for is sorted by torch instead.
        collected = most if most <= CANDIDATES.value else 0
        asked, ranks = self._new((samples,), torch.int32), self._new((samples,), torch.int32)
        own, norms = self._new((samples,), torch.float32), self._new((samples,), torch.float64)
        keys = torch.full((samples, collected), LOWEST_KEY.value, dtype=torch.int64, device=self._logits.device)
        logprobs.logprobs_kernel[(samples,)](
            self._logits, self._stride, self._rows, self._state.records, self._peaks, self._unit_masses,
            *self._scratch(), self.token_ids, asked, own, ranks, norms, keys, collected,
            self._vocab_size, self._num_blocks, BLOCKS_PADDED=self._padded, SHIFT=self._shift, num_warps=16,
        )  # fmt: skip
        logits = self._logits[:, : self._vocab_size]
        if collected or not most:
            keys = keys.sort(dim=-1, descending=True).values
            top_ids = self._vocab_size - 1 - (keys & ((1 << self._shift) - 1))
            top_ids = top_ids.clamp(min=0)
            top = logits.gather(1, top_ids)
        else:
            top, top_ids = (part[:, :most] for part in logits.sort(dim=-1, descending=True, stable=True))
        top = (top.double() - norms[:, None]).float()
        return DeviceLogprobs(asked, own, ranks, top_ids.int(), top)

    def _tiles(self) -> tuple[int, int]:
        return self._num_samples, triton.cdiv(self._num_blocks, _BLOCKS_AT_ONCE)

    def _scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for a sample's blocks and candidates."""
        samples = self._num_samples
        return self._new((samples, self._padded), torch.int32), self._new((samples, CANDIDATES.value), torch.int64)
