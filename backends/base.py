"""The interface between smcp_fx and whatever runs a network: `Backend`, `Engine`, `Fingerprint`.

A backend compiles a module into an engine; an engine runs and is timed. A latency means nothing without the
`Fingerprint` that says what it was measured on.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from smcp_fx.backends.timing.measuring import QUICK, Measurement, Timer, TimingConfig, measure_timers
from smcp_fx.errors import BackendError, TableError

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block

Array = NDArray[Any]

#: Precisions that networks run in. A backend refuses those that its runtime or device lacks.
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
#: Bytes per number in a network of reduced precision.
BYTES = {"fp16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Fingerprint:
    """What a latency was measured on. Latencies of different fingerprints are never mixed.

    ``settings``: whatever else changes a latency on this backend (driver, spinning, graph replay), by name.
    """

    backend: str
    device: str
    runtime: str
    version: str
    threads: int
    precision: str
    settings: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "settings": dict(self.settings)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fingerprint:
        """Return the fingerprint that `as_dict` wrote; `TableError` if fields are missing or unknown."""
        try:
            settings = tuple(sorted((str(k), str(v)) for k, v in dict(values["settings"]).items()))
            return cls(**{**values, "settings": settings})
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(f"not a device fingerprint: {repr(values)[:200]} ({error})") from error

    def key(self) -> str:
        """Return 16 hex digits that identify this fingerprint."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return a one-line description for people."""
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        pages = ", huge pages" if dict(self.settings).get("huge_pages") == "on" else ""
        return f"{self.runtime} {self.version}, {self.precision}, {threads}, {self.device}{pages}"


@dataclass(frozen=True)
class BlockLatency:
    """A block's latency: ``hot`` with its weights in cache, ``cold`` with its weights in memory.

    ``cold`` is None if the backend does not tell the two apart. ``pace_ms``: how long a fixed piece of work took at
    the core's usual pace at that time (`Pace.usual_ms`); 0 if that is not known.
    """

    hot: Measurement
    cold: Measurement | None = None
    pace_ms: float = field(default=0.0, compare=False)

    @property
    def stable(self) -> bool:
        """Whether the samples of every state were steady."""
        return self.hot.stable and (self.cold is None or self.cold.stable)

    def steadier(self, other: BlockLatency) -> BlockLatency:
        """Return the steady one of two measurements of a row; if neither is, the calmer one of each state."""
        if self.stable or other.stable:
            return self if self.stable else other
        cold = self.cold.surer(other.cold) if self.cold and other.cold else self.cold
        return BlockLatency(self.hot.surer(other.hot), cold, max(self.pace_ms, other.pace_ms))


class Engine(ABC):
    """A compiled network, with the example inputs that it is timed on. Use as a context manager, or close().

    ``cpu_bound``: it computes in the calling thread alone, so that disturbed runs can be told from slow ones.
    ``remarks``: sentences about the compilation that a user should read.
    """

    cpu_bound: bool = False
    remarks: tuple[str, ...] = ()

    @abstractmethod
    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Return the network's outputs, in order."""

    @abstractmethod
    def timer(self, inputs: Sequence[Array] | None = None) -> Timer:
        """Return a function that runs once on ``inputs`` (the example inputs) and returns the ms it took.

        The device is synchronised; copies of inputs and outputs between host and device are not counted.
        """

    def latency(
        self, inputs: Sequence[Array] | None = None, config: TimingConfig | None = None
    ) -> Measurement:
        """Measure one run: median and quartiles in ms."""
        return measure_timers([self.timer(inputs)], config, cpu_bound=self.cpu_bound)[0]

    @abstractmethod
    def reload(self) -> Engine:
        """Return the same network, loaded again: caches serve it differently when its memory lies elsewhere."""

    def layers(self) -> list[dict[str, Any]]:
        """Return each layer's time, as far as the runtime tells: name, ``ms``, ``nodes`` (the paths of the
        modules that it computes) and ``reformat`` (whether it only converts). Empty by default.
        """
        return []

    def close(self) -> None:
        """Free the runtime's resources."""
        return None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Backend(ABC):
    """Compiles networks and measures blocks on one device with fixed settings.

    ``calibrated``: compiling needs calibration data (`calibrate`). ``writer``: writes ONNX files like an
    imported one (`smcp_fx.backends.onnx.importing.writing.Writer`); None for `export_onnx`'s form.
    """

    name: ClassVar[str]
    calibrated: bool = False
    writer: Any = None

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """Return everything that this backend's latencies depend on."""

    @abstractmethod
    def compile(
        self, module: nn.Module, example_inputs: tuple[Tensor, ...], path: Path | str | None = None
    ) -> Engine:
        """Compile ``module`` in eval mode, and write the `files` of ``path``.

        `BackendError` if the runtime cannot express the module or computes different outputs.
        """

    def try_export(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> None:  # noqa: B027
        """Raise `BackendError` if ``module`` cannot be written for the runtime; the result is not checked or kept.

        Does nothing by default: PyTorch itself runs any module.
        """

    def files(self, path: Path | str) -> list[Path]:
        """Return the files that `compile` leaves for ``path``, the main one first."""
        return [Path(path)]

    def remarks(self) -> tuple[str, ...]:
        """Return sentences that a user should read before anything is measured."""
        return ()

    def calibrate(self, batches: Sequence[Array]) -> None:  # noqa: B027
        """Take batches of the network's input, which INT8 needs; other precisions ignore them."""

    def keep_in_float(self, layers: Collection[str]) -> None:  # noqa: B027
        """Keep these layers (module paths) in float from now on when the others are quantised."""

    def full_precision(self) -> Backend | None:
        """Return this backend in float32, as a reference for reduced precision; None if it is in float32."""
        return None

    def layer_errors(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> dict[str, float]:
        """Return, by layer, the error of the network's outputs if that layer alone is quantised, largest first.

        The error is a root mean square, as a share of the outputs' own. Empty if nothing is quantised.
        """
        return {}

    def require_quiet(self) -> None:  # noqa: B027
        """Raise `MachineBusyError` if the machine is too busy to measure on.

        Does nothing by default: a device of its own is always quiet.
        """

    def expect_blocks(self, blocks: Sequence[Block]) -> None:  # noqa: B027 - a hint
        """Prepare to measure these blocks; a chance to do their common work once."""

    def prepare_rows(self, rows: Sequence[tuple[Block, tuple[int, ...]]]) -> None:  # noqa: B027 - a hint
        """Prepare to measure these blocks at these widths; a chance to build several at a time."""

    def run_overhead_ms(self) -> float | None:
        """Return a run's own cost outside its blocks, in ms; None if unknown or not part of `latency`."""
        return None

    def cache_bytes(self) -> int:
        """Return the size of the cache that large networks outgrow, so that they fetch weights from memory."""
        return cache_bytes()

    def fading_half_ms(self) -> float:
        """Return after how many ms other processes have replaced half of that cache; inf if it stays."""
        return math.inf

    def block_latency(
        self, block: Block, widths: tuple[int, ...], config: TimingConfig | None = None
    ) -> BlockLatency:
        """Measure ``block`` at ``widths`` (channels); by default it is compiled and timed alone."""
        module, inputs = block.build(widths)
        with self.compile(module, inputs) as engine:
            return BlockLatency(engine.latency(config=config or QUICK))


def measure_interleaved(engines: Sequence[Engine], config: TimingConfig | None = None) -> list[Measurement]:
    """Measure ``engines`` in turns (a b a b ...), so that their ratio is fair; one result each, in order."""
    timers = [engine.timer() for engine in engines]
    return measure_timers(timers, config, cpu_bound=all(engine.cpu_bound for engine in engines))


def to_arrays(tensors: Sequence[Tensor]) -> list[Array]:
    """Return the tensors as contiguous arrays in host memory."""
    return [np.asarray(tensor.detach().cpu().numpy(), order="C") for tensor in tensors]


def cpu_name() -> str:
    """Return the name of this machine's processor, as the kernel reports it."""
    name = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields: dict[str, str] = {}
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
        name = fields.get("model name") or fields.get("Hardware") or ""
        model = [fields[k] for k in ("cpu family", "model", "stepping") if k in fields]
        if model:
            name = f"{name} (family {'/'.join(model)})"
    return name or platform.processor() or platform.machine()


def gpu_name() -> tuple[str, str]:
    """Return the first GPU's name and its driver's version, by nvidia-smi; `BackendError` without it."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"cannot ask nvidia-smi for the GPU's name ({error}); install a driver") from error
    name, _, driver = answer.strip().rpartition(",")
    return name.strip(), driver.strip()


#: Convolutional networks have up to some hundred MB of weights. A larger cache (a server's last-level cache, of
#: which a guest gets a part) holds nearly all of them, so the cache that they outgrow is the one inside it. Chosen,
#: not measured.
_LARGEST_CACHE = 64 << 20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cache_bytes() -> int:
    """Return the size of the cache that networks outgrow: this machine's largest of at most 64 MiB.

    32 MiB if the kernel does not say.
    """
    return max((size for size in _cache_sizes() if size <= _LARGEST_CACHE), default=32 << 20)


def inner_cache_bytes() -> int:
    """Return the size of the largest cache inside that one; 1 MiB if the kernel does not say."""
    return max((size for size in _cache_sizes() if size < cache_bytes()), default=1 << 20)


def _cache_sizes() -> list[int]:
    texts = [file.read_text().strip() for file in _CACHES.glob("index*/size")]
    return [int(text[:-1]) << 10 for text in texts if text.endswith("K") and text[:-1].isdigit()]
