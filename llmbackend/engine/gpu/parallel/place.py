"""RankPlace: which part of a split model a rank has.

For: everything about ranks. Does not know: torch, models, processes. Ranks are numbered as in vLLM: stage by stage, and
in a stage by their shares of its layers. Invariant: rank 0 is the engine's process, in the first stage; what the last
stage samples goes to all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...config import EngineConfig


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: int
    tensor_size: int = 1
    """Ranks of a stage."""
    pipeline_size: int = 1
    """Stages."""

    @classmethod
    def of(cls, config: EngineConfig, rank: int) -> RankPlace:
        return cls(rank, config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def size(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def share(self) -> int:
        """Of its stage's layers, 0 .. tensor_size - 1."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size

    @property
    def is_first(self) -> bool:
        """Of the stages."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pipeline_size - 1

    @property
    def sampler(self) -> int:
        """The rank whose sampled tokens all take: the first one of the last stage."""
        return self.size - self.tensor_size

    def layers(self, num_layers: int, stage: int | None = None) -> range:
        """Of a stage, this rank's by default: as even as it goes."""
        stage = self.stage if stage is None else stage
        return range(stage * num_layers // self.pipeline_size, (stage + 1) * num_layers // self.pipeline_size)
