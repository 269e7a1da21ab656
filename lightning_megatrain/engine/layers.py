"""Which modules are streamed, and which parameters stay resident on the device."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Parameter
from torch.nn.utils.parametrize import type_before_parametrizations

from lightning_megatrain.engine import hugging_face


@dataclass(frozen=True)
class Layers:
    """The parts of a module by where their weights live."""

    streamed: dict[str, nn.Module]
    """Modules whose weights are on the device only while they run, by path, in order of registration."""

    resident: dict[str, Parameter]
    """Parameters that stay on the device while the model runs, by path (one path for a parameter with several)."""


def find_layers(root: nn.Module, stream: Sequence[str] | None = None, resident: Sequence[str] | None = None) -> Layers:
    """Decides which modules of `root` are streamed.

    Args:
        root: The whole module.
        stream: Class names (``"LlamaDecoderLayer"``) or path patterns (``"model.layers.*"``) of the modules to stream. Left out: Hugging
            Face's `GradientCheckpointingLayer` modules where there are any, else every run of two or more like blocks in a `ModuleList` or
            `Sequential`. Of nested candidates the outermost is taken.
        resident: Class names or path patterns of modules never to stream, neither themselves nor anything in them.

    Returns:
        The streamed modules and the resident parameters. A parameter reachable from outside its layer as well (tied weights) is resident.

    Raises:
        ValueError: A pattern matched nothing, or nothing is left to stream.
    """
    kept = _matching(root, resident, "resident") if resident else {}
    candidates = _matching(root, stream, "layers") if stream else hugging_face.recomputable_layers(root) or _like_blocks(root)
    candidates = {name: module for name, module in candidates.items() if not _inside(name, kept) and name != ""}
    streamed = {name: module for name, module in _in_order(root, _outermost(candidates)) if _owns_parameters(module)}
    owners = _owners(root, streamed)
    shared = {parameter for parameter, found in owners.items() if len(found) > 1}
    streamed = {name: module for name, module in streamed.items() if any(p not in shared for p in module.parameters())}
    if not streamed:
        raise ValueError(
            f"No layer of {type(root).__name__} can be streamed: it has no Hugging Face layers and no run of two or more like blocks in a "
            f"ModuleList or Sequential{' outside of ' + str(list(resident)) if resident else ''}. Name the modules to stream by class or "
            "path, for example layers=['MyBlock'] or layers=['encoder.*'], or train this model with strategy='auto'."
        )
    layer_parameters = {p for module in streamed.values() for p in module.parameters()} - shared
    return Layers(streamed, {name: p for name, p in root.named_parameters() if p not in layer_parameters})


def _matching(root: nn.Module, patterns: Iterable[str], argument: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = {
            name: module
            for name, module in root.named_modules()
            if type_before_parametrizations(module).__name__ == pattern or (name and fnmatchcase(name, pattern))
        }
        if not matches:
            classes = sorted({type_before_parametrizations(module).__name__ for module in root.modules()})
            raise ValueError(
                f"{argument}={pattern!r} names no module of {type(root).__name__}. Its modules are of the classes {', '.join(classes)}."
            )
        found.update(matches)
    return found


def _like_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Every child of a `ModuleList` or `Sequential` that has a sibling of its own class; blocks without parameters may lie between them."""
    found: dict[str, nn.Module] = {}
    for path, module in root.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        by_class: dict[type, dict[str, nn.Module]] = defaultdict(dict)
        for name, child in module._modules.items():
            if child is not None and _owns_parameters(child):
                by_class[type_before_parametrizations(child)][f"{path}.{name}" if path else name] = child
        for blocks in by_class.values():
            if len(blocks) > 1:
                found.update(blocks)
    return found


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == other or name.startswith(other + ".") for other in modules)


def _outermost(candidates: dict[str, nn.Module]) -> dict[str, nn.Module]:
    inner = {id(child) for module in candidates.values() for child in module.modules() if child is not module}
    return {name: module for name, module in candidates.items() if id(module) not in inner}


def _in_order(root: nn.Module, candidates: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Candidates by order of registration, each module once."""
    wanted = {id(module) for module in candidates.values()}
    return ((name, module) for name, module in root.named_modules() if id(module) in wanted)


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _owners(root: nn.Module, streamed: dict[str, nn.Module]) -> dict[Parameter, set[int]]:
    """For each parameter, the streamed layers it is reached from; the rest of the model counts as one more."""
    layer_of = {id(child): id(layer) for layer in streamed.values() for child in layer.modules()}
    owners: dict[Parameter, set[int]] = defaultdict(set)
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[parameter].add(layer_of.get(id(module), id(root)))
    return owners
