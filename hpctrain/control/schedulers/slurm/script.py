"""Renders the job script from a request and a plan. Pure, except that it reads the templates."""

from __future__ import annotations

import re
import shlex
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.frozen import FrozenModel
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.profiles import slurm_folder
from hpctrain.control.schedulers.request import JobRequest

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATE = "job.sh.j2"

_PLAIN = re.compile(r"[\w@%+=:,./\[\]*|&()!~^-]+", re.ASCII)


class ScriptVariables(FrozenModel):
    """The variables of a job script's template. The filter ``quote`` quotes text for bash."""

    directives: tuple[str, ...] = Field(description="the #SBATCH lines of what is requested, quoted for Slurm's parser")
    run_dir: str = Field(description="absolute path of the run directory; the tasks of an array have task-N in it")
    folder: str = Field(description="absolute path of the folder that the job was submitted from")
    array: bool = Field(description="whether the job is an array")
    chain: int = Field(description="how many jobs continue each other's work; 1 for no chain")
    requeue: bool = Field(
        description="whether the job puts itself back in the queue when it has to stop; else another follows"
    )
    no_kill: bool = Field(
        description="whether the job keeps its other nodes when one fails, because its run goes on there"
    )
    signal: str = Field(description="signal that announces the time limit, without SIG")
    signal_seconds: int = Field(description="how long before the time limit it comes")
    nodes: int = Field(description="number of nodes")
    tasks_per_node: int = Field(description="ranks on each node")
    cpus_per_task: int | None = Field(description="CPUs of each rank; None where none were requested")
    gpus_per_node: int = Field(description="GPUs of each node; 0 for none")
    modules: tuple[str, ...] = Field(description="modules to load, in this order")
    setup: tuple[str, ...] = Field(description="lines of bash from the cluster profile, used as they are")
    virtual_environment: str | None = Field(description="folder of the virtual environment to activate, or None")
    environment: dict[str, str] = Field(description="variables to set, from the cluster profile")


def variables(
    request: JobRequest,
    profile: ClusterProfile,
    *,
    run_directory: Path,
    folder: Path,
    virtual_environment: Path | None = None,
    no_kill: bool = False,
) -> ScriptVariables:
    """The values for a template.

    Args:
        profile: gives modules, setup lines and variables.
        run_directory, folder: absolute; where the run's files are, and where the job is submitted from.
        virtual_environment: that the script activates.
        no_kill: the run goes on without a node that fails.
    """
    return ScriptVariables(
        directives=directives(request),
        run_dir=str(run_directory),
        folder=str(folder),
        array=request.array is not None,
        chain=request.chain,
        requeue=request.requeue,
        no_kill=no_kill,
        signal=request.signal,
        signal_seconds=request.signal_seconds,
        nodes=request.nodes,
        tasks_per_node=request.tasks_per_node,
        cpus_per_task=request.cpus_per_task,
        gpus_per_node=request.gpus_per_node,
        modules=profile.modules,
        setup=profile.setup,
        virtual_environment=str(virtual_environment) if virtual_environment else None,
        environment=profile.environment,
    )


def list_variables() -> str:
    """Name, type and meaning of each variable, one per line."""
    fields = ScriptVariables.model_fields.items()
    kinds = {name: _kind(field.annotation) for name, field in fields}
    widest = max(map(len, kinds)), max(map(len, kinds.values()))
    lines = [f"{name:{widest[0]}}  {kinds[name]:{widest[1]}}  {field.description}" for name, field in fields]
    return "\n".join([*lines, "", "{{ run_dir | quote }} is one word for bash, whatever characters are in it"])


def render(values: ScriptVariables, template: Path | None = None) -> str:
    """Render the text of the job script.

    Args:
        template: a user's own; it can include that of hpctrain (``{% include "job.sh.j2" %}``).

    Raises:
        HpctrainError: the template cannot be read, is no valid template, or uses a name that it is not given; names
            the file and the line.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    name = str(template) if template else _TEMPLATE
    if template and not template.is_file():
        raise HpctrainError("HT-template-not-valid", "--template {template}: there is no such file", template=template)
    try:
        text = _environment(template).get_template(name).render(dict(values))
    except TemplateSyntaxError as error:
        raise HpctrainError(
            "HT-template-not-valid",
            "{file}:{line}: {problem}",
            file=error.filename or name,
            line=error.lineno,
            problem=error.message,
        ) from error
    except (TemplateError, TypeError, ValueError, ZeroDivisionError) as error:
        raise HpctrainError(
            "HT-template-not-valid",
            "{place}: {reason}",
            _valid_names(str(error)),
            place=_place(error, name),
            reason=error,
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise HpctrainError(
            "HT-template-not-valid", "--template {template}: cannot be read: {reason}", template=template, reason=error
        ) from error
    if not text.startswith("#!"):
        raise HpctrainError(
            "HT-template-not-valid",
            "{template}: sbatch needs a script that begins with #!",
            "begin with the line #!/bin/bash",
            template=name,
        )
    return text


def _environment(template: Path | None) -> Environment:
    from jinja2 import ChoiceLoader, Environment, FileSystemLoader, FunctionLoader, StrictUndefined

    def own(name: str) -> str | None:
        return template.read_text() if template and name == str(template) else None

    folders = [slurm_folder(), *([template.parent] if template else [])]
    environment = Environment(  # noqa: S701 - it is bash, which the filter quotes for
        loader=ChoiceLoader([FunctionLoader(own), FileSystemLoader(folders)]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment


def _kind(annotation: Any) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return re.sub(r"hpctrain\.[a-z_.]+\.", "", str(annotation))


def _place(error: Exception, name: str) -> str:
    """File and line of a template's fault: Jinja puts the templates' own lines into the traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.endswith(".py")]
    if not frames:
        return name
    # A template that was not loaded from a file of hpctrain's is the user's.
    file = frames[-1].filename
    return f"{name if file == '<template>' else file}:{frames[-1].lineno}"


def _valid_names(message: str) -> str:
    parts = message.split("'")
    missing = parts[1] if message.endswith("is undefined") and len(parts) > 1 else ""
    return nearest(missing, ScriptVariables.model_fields)


def directive(option: str, value: str | int | None = None) -> str:
    """The line of one option.

    Within double quotes Slurm's parser (22.05) takes every character as it is, but for the backslash, which makes the
    next one plain. Outside of them a blank ends the value, even one after a backslash, and # begins a comment.

    Args:
        option: its long name, without the dashes.
        value: one line of text; None for an option without a value.
    """
    if value is None:
        return f"#SBATCH --{option}"
    text = str(value)
    if not _PLAIN.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{option}={text}"


def directives(request: JobRequest) -> tuple[str, ...]:
    """The options of the job, one per line, without those about the script itself (log, signal, requeue).

    ``--dependency`` is not among them: it is for the first job, and the script is also that of those which follow.
    """
    gpus = _gpus(request)
    asked: dict[str, str | int | None] = {
        "job-name": request.name,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "constraint": request.constraint,
        "nodes": request.nodes,
        "ntasks-per-node": request.tasks_per_node,
        "cpus-per-task": request.cpus_per_task,
        request.gpu_option: gpus,
        "mem": request.memory,
        "time": request.time,
        "array": request.array,
    }
    lines = [directive(option, value) for option, value in asked.items() if value is not None]
    if request.exclusive:
        lines.append(directive("exclusive"))
    further = {option: value for option, value in request.sbatch.items() if not (gpus and option == request.gpu_option)}
    return (*lines, *(directive(option, value) for option, value in further.items()))


def _gpus(request: JobRequest) -> str | None:
    if not request.gpus_per_node:
        return None
    number = f"{request.gpu_type}:{request.gpus_per_node}" if request.gpu_type else str(request.gpus_per_node)
    if request.gpu_option != "gres":
        return number
    # Slurm uses only the last --gres.
    others = request.sbatch.get("gres")
    return f"gpu:{number},{others}" if others else f"gpu:{number}"
