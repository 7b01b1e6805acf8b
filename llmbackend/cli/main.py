"""The `llmbackend` command and its subcommands.

Invariants: an invalid flag ends with a message that names it and exit code 2; a subcommand's module is imported when it
is called or completed in a shell, but not for help or version.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmbackend import __version__

from .command_line import PlainHelpCommand, join_equals_signs, lazy_command

_UNREAD = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
"""Settings of a subcommand that reads its arguments itself."""

_USAGE_ERROR = 2

app = typer.Typer(
    help="Serve large language models the Triton way.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"llmbackend {__version__}")
        raise typer.Exit


@app.command(cls=lazy_command(".serve", only_completion=True), add_help_option=False, context_settings=_UNREAD)
def serve(context: typer.Context) -> None:
    """Serve models over KServe v2 HTTP and gRPC, generate/SSE and the OpenAI API."""
    gc.disable()  # imports create objects that stay; the server enables it when its imports are complete
    try:
        from .serve import app as command

        raise typer.Exit(command(args=context.args, prog_name=context.command_path, standalone_mode=False))
    finally:
        gc.enable()


@app.command(cls=lazy_command(".chat.command"))
def chat() -> None:
    """Talk to a model of any OpenAI-compatible server."""


@app.command(cls=lazy_command(".top.command"))
def top() -> None:
    """Watch what a running server computes: engines, requests, tokens per second, KV memory."""


@app.command(cls=lazy_command(".cluster"))
def cluster() -> None:
    """Several machines as one server."""


@app.command(cls=lazy_command(".check"))
def check() -> None:
    """Check whether a model loads, how it is computed, and how much memory it takes."""


@app.command(cls=lazy_command(".models"))
def models() -> None:
    """List the models that can be served by name."""


@app.command(cls=PlainHelpCommand)
def bench(
    model: Annotated[str, typer.Option(help="Checkpoint (directory, GGUF file, hub id, known model), or mock.")],
    workload: Annotated[
        Path | None,
        typer.Option(help='JSON list of {"prompt_token_ids": [...] or "prompt_tokens": n, "output_tokens": n}.'),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Write plots to this file, as SVG.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    load_format: Annotated[str, typer.Option(help="safetensors, or dummy for random weights.")] = "safetensors",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum number of requests per step.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget per step.")] = 512,
    quantization: Annotated[str | None, typer.Option(help="int8, int4 or fp8; default: none.")] = None,
    engine_args: Annotated[str, typer.Option(help='Other engine arguments, as JSON: {"num_threads": 1}.')] = "{}",
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Repeat the run with each optimisation turned off in turn.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Instead of running a workload, show where the time of a prompt and of decode steps goes (CPU only).",
        ),
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Same as for serve.")] = False,
) -> None:
    """Run a workload through the engine alone, all requests at once, end-of-sequence ignored."""
    from .bench import check_model, check_output, check_task, further_arguments, run_bench
    from .bench_profile import run_profile
    from .models import go_offline, local_model

    if offline:
        go_offline()
    check_task(workload, profile, {"--plot": plot_path, "--ablate": ablate})
    further = further_arguments(engine_args)
    for flag, path in (("--json", json_path), ("--plot", plot_path)):
        check_output(flag, path)
    engine: dict[str, Any] = {
        "model": local_model(model), "dtype": dtype, "device": device, "load_format": load_format,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "quantization": quantization,
        **further,
    }  # fmt: skip
    try:
        check_model(engine)
        if workload is None:
            run_profile(json_path, as_served=True, **engine)
        else:
            run_bench(
                workload_path=workload,
                json_path=json_path,
                plot_path=plot_path,
                ablate=ablate,
                as_served=True,
                **engine,
            )
    except (ValueError, RuntimeError, OSError) as error:
        typer.echo(f"bench: {error}", err=True)
        raise typer.Exit(1) from error


@app.command(name="install-triton-backend", cls=PlainHelpCommand)
def install_triton_backend(
    directory: Annotated[Path, typer.Argument(help="Triton's --backend-directory.", show_default=False)],
    name: Annotated[str, typer.Option(help='The backend\'s name there; vllm serves backend: "vllm".')] = "llm",
    engine_python: Annotated[
        str, typer.Option(help="The Python that runs engines (torch, transformers); default: this one.")
    ] = "",
) -> None:
    """Install the `llm` backend into NVIDIA's Triton, as a python-based backend (docs/inside_triton.md)."""
    from ..adapter.inside_triton.install import install

    try:
        target = install(directory, name, engine_python)
    except (OSError, LookupError) as error:
        typer.echo(f"install-triton-backend: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"installed in {target}")


def main() -> None:
    """Entry point of the `llmbackend` command. Exits with code 2 if its command line is invalid."""
    join_equals_signs(os.environ)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        sys.exit(app(prog_name="llmbackend", args=sys.argv[1:], standalone_mode=False))
    except typer.TyperException as error:
        typer.echo(_wrong_usage(error), err=True)
        sys.exit(_USAGE_ERROR)


def _wrong_usage(error: typer.TyperException) -> str:
    """The command's usage, followed by the error, where it is seen; in Triton's words."""
    context = getattr(error, "ctx", None)
    usage = f"{context.get_usage()}\n\n" if context is not None else ""
    if not isinstance(error, typer.BadParameter) or not error.message:  # a missing parameter has no message
        return f"{usage}{error.format_message()}"
    option = error.param_hint or (error.param.opts[0] if error.param is not None else "")
    if not option:
        return f"{usage}{error.message}"
    message = error.message if str(option) in error.message else f"{option}: {error.message}"
    return f'{usage}Bad option: "{option}".\n{message}'


if __name__ == "__main__":
    main()
