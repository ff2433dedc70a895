"""Load damaged and made-up manifests, run what loads, and watch what the process does meanwhile.

    python tests/serialization/manifest_fuzzing.py 100000 [seed]

Prints a JSON object: how many were refused with our error, how many loaded and ran, and the faults: other errors,
a process that died while it loaded, and audit events (files written, imports, processes, sockets, code run) that a
valid load and run do not have. ``died``: what PyTorch's own operations ended the process with, while a model ran.
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import safetensors.torch
import torch
from saved_models import (
    ChannelShuffle,
    FunctionalNetwork,
    LeavesWithChildren,
    SharedModules,
    prune_and_convert,
)
from test_saved_regions import NETWORKS, new, pruned
from torch import fx, nn

from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.serialization.graph_module_codec import decode_graph_module
from smcp_fx.serialization.region_codec import put_regions
from smcp_fx.serialization.safe_modules import specifications
from smcp_fx.serialization.safe_operations import functions, tensor_methods
from smcp_fx.serialization.saving import _contents, _damaged, _of_class, _parsed, render
from smcp_fx.storage.tensor_file import restore

#: Asked for by tracebacks, inspection and memory management, in a valid run or not.
_HARMLESS = (
    "sys._getframe",
    "object.__getattr__",
    "object.__setattr__",
    "object.__delattr__",
    "code.__new__",
    "gc.",
    "builtins.id",
)
_HOSTILE = [
    *(
        "__class__",
        "__globals__",
        "untyped_storage",
        "\uff55ntyped_storage",
        "tofile",
        "numpy",
        "sort",
        "apply_",
        "map_",
    ),
    *(
        "share_memory_",
        "register_hook",
        "requires_grad_",
        "data_ptr",
        "set_",
        "resize_",
        "for",
        "x;y",
        "a'b",
        'a"b',
    ),
    *("x\ny", "../../etc/passwd", "forward", "_modules", "type", "", "self", "torch", "format", "os.system"),
    *(
        "builtins.eval",
        "builtins.getattr",
        "torch.load",
        "torch.save",
        "operator.call",
        "operator.attrgetter",
    ),
    *(
        "torch.nn.modules.lazy.LazyModuleMixin",
        "torchvision.ops.roi_align.roi_align",
        "torch.hub.load",
        "own.Function",
        "numpy.save",
    ),
]
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 1 << 16, 1 << 31, 1 << 62, 1 << 70, 0.5, -1e300),
    *(
        [],
        {},
        [[]],
        {"list": []},
        {"tuple": [1, 2]},
        {"dict": [["a", 1]]},
        {"float": "nan"},
        {"device": "cuda:0"},
    ),
    *(
        {"range": [0, 1 << 40, 1]},
        {"size": [1, 2]},
        {"node": "x"},
        {"function": "torch.relu"},
        {"tensor": "stem.weight"},
    ),
    *({"slice": [0, None, 2]}, {"dtype": "torch.float16"}, {"ellipsis": None}, {"complex": ["1", "2"]}),
]


_CASES_A_PROCESS = 2000


class Watch:
    """Collects audit events while it is on."""

    def __init__(self) -> None:
        self.events: set[str] = set()
        self.on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or event.startswith(_HARMLESS):
            return
        if event == "open":
            mode, flags = str(arguments[1] or ""), arguments[2] if isinstance(arguments[2], int) else 0
            if not (flags & 0o3) and not set(mode) & set("wax+"):
                return  # read: a traceback's source
            event = f"open {arguments[0]!r} {mode}"
        elif event == "import":
            event = f"import {arguments[0]}"
        elif event in ("exec", "compile"):
            code = arguments[0] if event == "exec" else arguments[1]
            name = getattr(code, "co_filename", code)
            if event == "compile" and name == "<unknown>":
                return  # a traceback parses a line to mark a part of it; to run it would be another event
            event = f"{event} {'generated' if str(name).startswith('<eval_with_key>') else name}"
        self.events.add(event)


def networks() -> list[tuple[str, tuple[Any, ...], nn.Module, nn.Module | None]]:
    """Name, inputs and converted model of each network that the manifests are made from.

    The last is the model that its regions are put into, if it has regions.
    """
    torch.manual_seed(0)
    image = torch.randn(2, 3, 8, 8)
    leaves = fx.symbolic_trace(LeavesWithChildren())
    found: list[tuple[str, tuple[Any, ...], nn.Module, nn.Module | None]] = [
        ("shared", (image,), prune_and_convert(SharedModules(), image), None),
        ("functional", (image,), prune_and_convert(FunctionalNetwork(), (image, 0.5)), None),
        ("shuffle", (image,), prune_and_convert(ChannelShuffle(), image), None),
        ("leaves", (torch.randn(2, 3, 8),), leaves, None),
    ]
    for name in ("dicts, lists and strings", "layers and tensors beside"):
        kind, inputs = NETWORKS[name]
        found.append((name, inputs, pruned(kind, inputs), new(kind)))
    return found


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.append((value, key))
        _places(item, found)
    return found


def _any_name(draw: random.Random) -> str:
    return draw.choice(
        (
            draw.choice(_HOSTILE),
            draw.choice(sorted(functions())),
            draw.choice(sorted(tensor_methods())),
            draw.choice(sorted(specifications())),
            draw.choice(dir(torch.Tensor)),
        )
    )


def mutated(manifest: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The manifest with one to three changes: values swapped, removed, made up; calls put between the others."""
    changed = copy.deepcopy(manifest)
    for _ in range(draw.choice((1, 1, 2, 3))):
        region = draw.choice(changed["regions"]) if changed.get("regions") else changed
        graph = region.get("graph", []) if isinstance(region, dict) else []
        parts = [
            changed.get(name, []) for name in ("modules", "tensors", "regions", "layers", "rest", "training")
        ]
        places = _places(draw.choice([graph, graph, *filter(None, parts)]), [])
        if not places:
            continue
        owner, key = draw.choice(places)
        way = draw.randrange(6)
        if way == 0:
            owner[key] = copy.deepcopy(draw.choice(_VALUES))
        elif way == 1:
            owner[key] = _any_name(draw)
        elif way == 2:
            other, at = draw.choice(places)
            owner[key] = copy.deepcopy(other[at])
        elif way == 3:
            del owner[key]
        elif way == 4 and isinstance(owner, list):
            owner.insert(draw.randrange(len(owner) + 1), copy.deepcopy(draw.choice(_VALUES)))
        else:
            _put_call(graph, draw)
    return changed


def _put_call(graph: list[Any], draw: random.Random) -> None:
    """A call on what an earlier node gives, whose result takes the place of that in all later nodes."""
    place = draw.randrange(1, len(graph)) if len(graph) > 1 else 0
    names = [node["name"] for node in graph[:place] if isinstance(node, dict) and "name" in node] or ["x"]
    source = draw.choice(names)
    op = draw.choice(("call_function", "call_method", "call_method", "get_attr", "call_module"))
    arguments: list[Any] = [{"node": source}]
    target = _any_name(draw)
    if op == "call_function" and draw.random() < 0.4:
        target, arguments = "builtins.getattr", [*arguments, draw.choice([*dir(torch.Tensor), *_HOSTILE])]
    elif draw.random() < 0.5:
        arguments.append(copy.deepcopy(draw.choice(_VALUES)))
    kwargs = {"key": {"node": draw.choice(names)}} if draw.random() < 0.1 else {}
    later = json.loads(
        json.dumps(graph[place:]).replace(json.dumps({"node": source}), json.dumps({"node": "put"}))
    )
    graph[place:] = [{"name": "put", "op": op, "target": target, "args": arguments, "kwargs": kwargs}, *later]


def _too_long(*_: Any) -> None:
    raise TimeoutError


def _loaded(content: bytes, text: bytes, into: nn.Module | None) -> nn.Module:
    """`load` of files that are in memory, so that reading them is no event."""
    path = Path("in memory")
    manifest = _parsed(text, path)
    model = _of_class(into, manifest, path)
    with _damaged(path, manifest):
        device = torch.device("cpu")
        tensors = restore(safetensors.torch.load(content), manifest["tensors"], device)
        if model is None:
            return decode_graph_module(manifest, manifest["class"], tensors, device)
        put_regions(model, manifest, tensors, device)
        return model


def run(count: int, seed: int, seconds: float = 1e9) -> dict[str, Any]:
    """Load and run ``count`` manifests, or as many as ``seconds`` allow, in processes that may die."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sources = []
    for name, inputs, module, into in networks():
        content, text = _contents(module, {})
        sources.append((name, inputs, content, json.loads(text), into))
    end, context = time.monotonic() + seconds, multiprocessing.get_context("fork")
    told, faults, done = Counter[str](), list[str](), 0
    while done < count and time.monotonic() < end:
        reading, writing = context.Pipe(duplex=False)
        numbers = range(done, min(done + _CASES_A_PROCESS, count))
        process = context.Process(target=_work, args=(sources, numbers, seed, writing))
        process.start()
        writing.close()
        stage = "loading"
        with contextlib.suppress(EOFError):
            while time.monotonic() < end:
                kind, text = reading.recv()
                if kind == "fault":
                    faults.append(f"case {done}: {text}")
                elif kind == "done":
                    done, stage = done + 1, "loading"
                    told.update(text.split())
                else:
                    stage = kind
        if process.is_alive():
            process.terminate()
        process.join()
        if process.exitcode and time.monotonic() < end:
            told["died"] += 1
            if stage == "loading":
                faults.append(f"case {done}: loading ended the process ({process.exitcode})")
            done += 1
    return {"count": done, **told, "faults": faults}


def _work(sources: list[Any], numbers: range, seed: int, sender: Any) -> None:
    """Try cases one after the other; the case alone, not those before it, says what it is."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch.fx prints the code of what fails
    signal.signal(signal.SIGALRM, _too_long)
    watch = Watch()
    for _ in range(2):  # what is imported on first use is there the second time
        for _, inputs, content, manifest, into in sources:
            watch.on = True
            _loaded(content, render(manifest), into)(*inputs)
            watch.on = False
    allowed = set(watch.events)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for number in numbers:
        name, inputs, content, manifest, into = sources[number % len(sources)]
        text = render(mutated(manifest, random.Random(f"{seed} {number}")))
        told = "refused"
        watch.events.clear()
        try:
            signal.alarm(20)
            watch.on = True
            loaded = _loaded(content, text, into)
            watch.on, told = False, "loaded"
            sender.send(("running", ""))
            watch.on = True
            with torch.no_grad():
                loaded(*copy.deepcopy(inputs))
            told = "loaded ran"
        except (CheckpointError, InputError):
            pass
        except Exception as error:
            if told == "refused":
                sender.send(("fault", f"{name}: load raised {type(error).__name__}: {error}"[:300]))
                told = "other"
        finally:
            watch.on = False
            signal.alarm(0)
        new = watch.events - allowed
        if new:
            sender.send(("fault", f"{name}: {sorted(new)}"[:600]))
        sender.send(("done", told))


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:] if word.isdigit()]
    outcome = run(given[0], given[1] if len(given) > 1 else 0, given[2] if len(given) > 2 else 1e9)
    print(json.dumps(outcome, indent=1))
