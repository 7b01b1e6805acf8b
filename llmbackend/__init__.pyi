from .core.errors import TritonError as TritonError
from .demo import DEMO_MODEL as DEMO_MODEL
from .demo import DEMO_REPOSITORY as DEMO_REPOSITORY
from .embedding.engine import Engine as Engine
from .embedding.generation import Completion as Completion
from .embedding.generation import Generation as Generation
from .embedding.generation import Logprob as Logprob
from .embedding.generation import Prompt as Prompt
from .embedding.generation import Usage as Usage
from .embedding.sampling_params import SamplingParams as SamplingParams
from .embedding.server import Server as Server

__all__: list[str]
__version__: str
