"""Commands on images with everything installed: `image`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlboost_cli.terminal.completion import AsJson


class ImageAction(StrEnum):
    """What to do with images."""

    build = "build"
    list = "list"
    rm = "rm"


class ImageEngine(StrEnum):
    """What is installed beside the trainer."""

    vllm = "vllm"
    transformers = "transformers"


def image(
    action: Annotated[ImageAction, typer.Argument(help="What to do", metavar="build|list|rm")],
    place: Annotated[
        str, typer.Argument(help="docker, gcp/REGION or aws/REGION; list, rm: also gcp", metavar="PLACE")
    ],
    name: Annotated[
        str | None,
        typer.Argument(help="rm: the image, as `list` names it", metavar="IMAGE", show_default=False),
    ] = None,
    engine: Annotated[ImageEngine, typer.Option(help="build: the engine in it")] = ImageEngine.vllm,
    target: Annotated[
        Path, typer.Option("--output", "-o", help="build docker: folder for the Dockerfile and its files")
    ] = Path("rlboost-image"),
    tag: Annotated[str, typer.Option(help="build docker: the image's name")] = "rlboost:latest",
    base: Annotated[
        str | None, typer.Option(help="build docker: image to begin with; default: Ubuntu", metavar="IMAGE")
    ] = None,
    only_write: Annotated[
        bool, typer.Option("--only-write", help="build docker: write the files, build nothing")
    ] = False,
    changes: Annotated[
        Path | None,
        typer.Option(
            "--with", help="build: YAML file with fields of the job that buys the machine", metavar="FILE"
        ),
    ] = None,
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
) -> None:
    """Make, list or delete machine images with torch, vLLM and RLBoost installed

    Example: rlboost image build aws/us-east-1
    """
    from dataclasses import asdict

    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError

    if (name is not None) != (action is ImageAction.rm):
        word = "needs" if action is ImageAction.rm else "takes no"
        raise ConfigError(f"image {action} {word} IMAGE", "type: rlboost image rm PLACE IMAGE")
    if place == "docker":
        if action is not ImageAction.build:
            raise ConfigError(
                f"image {action} is for clouds", "type: docker image ls --filter label=rlboost-image"
            )
        _write_container(target, str(engine), tag, base, only_write)
        return
    if action is ImageAction.build:
        from rlboost_cli.acceptance.runner import interruptible
        from rlboost_cli.acceptance.trial_job import read_changes
        from rlboost_cli.images.build import build

        wanted = {} if changes is None else read_changes(changes)
        with output.working() as say, interruptible():
            made = build(place, str(engine), wanted, say, yes=yes)
        output.as_json(asdict(made)) if as_json else output.show(made.name)
        output.progress(f"write it in the job file: image: {made.name}")
        return
    from rlboost_providers.registry import image_store

    store = image_store(place)
    if action is ImageAction.rm:
        store.delete(str(name))
        output.progress(f"deleted {name}")
        return
    found = store.images()
    if as_json:
        output.as_json({"images": [asdict(each) for each in found]})
    elif not found:
        output.progress(f"no image that RLBoost made in {place}; rlboost image build {place} makes one")
    for each in () if as_json else found:
        ready = "" if each.is_ready else ", not ready yet"
        output.show(
            f"{each.name}  {each.label}  {each.engine}, rlboost {each.version}, {each.size_gb} GB{ready}"
        )


def _write_container(target: Path, engine: str, tag: str, base: str | None, only_write: bool) -> None:
    from rlboost_cli.images.recipe import BASE, build_context, builder, write_context
    from rlboost_cli.terminal import output

    folder = write_context(target, engine, base or BASE)
    output.progress(f"wrote {folder}/Dockerfile and what it needs")
    program = None if only_write else builder()
    if program is None:
        output.progress(f"build it where there is a builder: docker build --tag {tag} {folder}")
        return
    build_context(folder, tag, program, output.progress)
    output.show(tag)
