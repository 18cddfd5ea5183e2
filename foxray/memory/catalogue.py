"""The GPUs people train on, how much of each a training process can use, and sizes as text.

The figures are the totals that `nvidia-smi` shows, which are a little under the round number on the box.
What a process can use is less again: the CUDA context, cuBLAS's workspace and the caching allocator's
fragmentation come off it. A card that exists with several memory sizes has an entry for each; its bare
name means the smallest, since what fits there fits the others. This module imports neither torch nor
NVML, so that a command line can check a name at once.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from foxray.errors import UserError

KIB, MIB, GIB = 1024, 1024**2, 1024**3
CONTEXT_BYTES = 450 * MIB
"""What a CUDA context takes before the first tensor: 300 to 450 MiB on current drivers."""
FRAGMENTATION = 1.12
"""Bytes that the caching allocator reserves for each byte in tensors."""
SMALLEST_LIMIT_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A graphics card with one memory size."""

    name: str
    """As people write it; ends in the memory size where the card exists with several."""
    vram_bytes: int
    """The total that `nvidia-smi` shows."""
    aliases: tuple[str, ...] = ()
    """Other names, without a memory size."""
    compute_capability: tuple[int, int] = (8, 6)
    """NVIDIA's (major, minor); from Hopper (9, 0) on cuBLAS's workspace is larger."""

    def __post_init__(self) -> None:
        if self.usable_bytes <= 0:
            raise ValueError(f"{self.name}: {self.vram_bytes} bytes do not hold a CUDA context")

    @property
    def workspace_bytes(self) -> int:
        """What PyTorch gives cuBLAS per handle and stream: 8.125 MiB, and 32 MiB from Hopper on."""
        return 32 * MIB if self.compute_capability >= (9, 0) else 8 * MIB + 128 * KIB

    @property
    def usable_bytes(self) -> int:
        """Bytes of tensors that one training process can hold: about 3250 MiB on a 4 GB card."""
        return int((self.vram_bytes - CONTEXT_BYTES - self.workspace_bytes) / FRAGMENTATION)


def _gpu(name: str, mib: int, capability: tuple[int, int], *aliases: str) -> Gpu:
    return Gpu(name=name, vram_bytes=mib * MIB, compute_capability=capability, aliases=aliases)


_VOLTA, _TURING, _A100, _AMPERE, _ADA = (7, 0), (7, 5), (8, 0), (8, 6), (8, 9)
_HOPPER, _BLACKWELL, _BLACKWELL_RTX = (9, 0), (10, 0), (12, 0)

GPUS: tuple[Gpu, ...] = (
    _gpu("GTX 1650", 4096, _TURING, "1650"),
    _gpu("GTX 1660 Ti", 6144, _TURING, "1660 Ti"),
    _gpu("GTX 1080 Ti", 11264, (6, 1), "1080 Ti"),
    _gpu("RTX 2060", 6144, _TURING),
    _gpu("RTX 2070", 8192, _TURING),
    _gpu("RTX 2080", 8192, _TURING),
    _gpu("RTX 2080 Ti", 11264, _TURING, "2080 Ti"),
    _gpu("RTX 3050", 8192, _AMPERE),
    _gpu("RTX 3050 Laptop", 4096, _AMPERE),
    _gpu("RTX 3050 Ti", 4096, _AMPERE, "3050 Ti", "RTX 3050 Ti Laptop"),
    _gpu("RTX 3060 8GB", 8192, _AMPERE),
    _gpu("RTX 3060 12GB", 12288, _AMPERE),
    _gpu("RTX 3060 Laptop", 6144, _AMPERE),
    _gpu("RTX 3060 Ti", 8192, _AMPERE, "3060 Ti"),
    _gpu("RTX 3070", 8192, _AMPERE, "RTX 3070 Laptop"),
    _gpu("RTX 3070 Ti", 8192, _AMPERE, "3070 Ti", "RTX 3070 Ti Laptop"),
    _gpu("RTX 3080 10GB", 10240, _AMPERE),
    _gpu("RTX 3080 12GB", 12288, _AMPERE),
    _gpu("RTX 3080 Laptop 8GB", 8192, _AMPERE),
    _gpu("RTX 3080 Laptop 16GB", 16384, _AMPERE),
    _gpu("RTX 3080 Ti", 12288, _AMPERE, "3080 Ti"),
    _gpu("RTX 3090", 24576, _AMPERE),
    _gpu("RTX 3090 Ti", 24564, _AMPERE, "3090 Ti"),
    _gpu("RTX 4050 Laptop", 6141, _ADA, "RTX 4050"),
    _gpu("RTX 4060", 8188, _ADA, "RTX 4060 Laptop"),
    _gpu("RTX 4060 Ti 8GB", 8188, _ADA, "4060 Ti"),
    _gpu("RTX 4060 Ti 16GB", 16380, _ADA, "4060 Ti"),
    _gpu("RTX 4070", 12282, _ADA),
    _gpu("RTX 4070 Laptop", 8188, _ADA),
    _gpu("RTX 4070 Super", 12282, _ADA),
    _gpu("RTX 4070 Ti", 12282, _ADA, "4070 Ti"),
    _gpu("RTX 4080", 16376, _ADA),
    _gpu("RTX 4080 Laptop", 12282, _ADA),
    _gpu("RTX 4080 Super", 16376, _ADA),
    _gpu("RTX 4090", 24564, _ADA),
    _gpu("RTX 4090 Laptop", 16376, _ADA),
    _gpu("RTX 5070", 12227, _BLACKWELL_RTX),
    _gpu("RTX 5070 Ti", 16303, _BLACKWELL_RTX, "5070 Ti"),
    _gpu("RTX 5080", 16303, _BLACKWELL_RTX),
    _gpu("RTX 5090", 32607, _BLACKWELL_RTX),
    _gpu("T4", 15360, _TURING),
    _gpu("P100", 16384, (6, 0)),
    _gpu("V100 16GB", 16384, _VOLTA),
    _gpu("V100 32GB", 32768, _VOLTA),
    _gpu("Quadro RTX 6000", 24576, _TURING),
    _gpu("A2", 15356, _AMPERE),
    _gpu("A10", 23028, _AMPERE),
    _gpu("A10G", 23028, _AMPERE),
    _gpu("A30", 24576, _A100),
    _gpu("A40", 46068, _AMPERE),
    _gpu("RTX A2000", 6138, _AMPERE, "A2000"),
    _gpu("RTX A4000", 16376, _AMPERE, "A4000"),
    _gpu("RTX A4500", 20470, _AMPERE, "A4500"),
    _gpu("RTX A5000", 24564, _AMPERE, "A5000"),
    _gpu("RTX A6000", 49140, _AMPERE, "A6000"),
    _gpu("L4", 23034, _ADA),
    _gpu("L40", 46068, _ADA),
    _gpu("L40S", 46068, _ADA),
    _gpu("RTX 4000 Ada", 20475, _ADA),
    _gpu("RTX 5000 Ada", 32760, _ADA),
    _gpu("RTX 6000 Ada", 49140, _ADA, "6000 Ada"),
    _gpu("A100 40GB", 40960, _A100),
    _gpu("A100 80GB", 81920, _A100),
    _gpu("H100 80GB", 81559, _HOPPER),
    _gpu("H100 NVL", 95830, _HOPPER),
    _gpu("H200", 143771, _HOPPER, "H200 NVL"),
    _gpu("GH200", 97871, _HOPPER),
    _gpu("B200", 183359, _BLACKWELL),
)

# What drivers and shops put around the name without changing which card it is.
_NOISE = frozenset(
    {"nvidia", "corporation", "geforce", "tesla", "gpu", "graphics", "card", "generation", "desktop", "pcie"}
    | {"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"}
)
_SIZE_TOLERANCE = 0.1  # an A10 "with 24 GB" shows 22.5 GiB, a T4 "with 16 GB" 15


def _family_and_gigabytes(name: str) -> tuple[str, int | None]:
    """The name folded to one word without its memory size, and that size: `("rtx3060", 12)`."""
    spaced = re.sub(r"[^a-z0-9]+", " ", name.casefold())
    spaced = re.sub(r"\b(\d+) ?(?:gb|gib|g)\b", r"\1gb", spaced)
    words = [word for word in spaced.split() if word not in _NOISE]
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    family = "".join(word for word in words if not re.fullmatch(r"\d+gb", word))
    family = family.removeprefix("nvidia").removeprefix("geforce").removesuffix("gpu")
    return family, sizes[-1] if sizes else None


def _families() -> dict[str, list[Gpu]]:
    families: dict[str, list[Gpu]] = {}
    for gpu in sorted(GPUS, key=lambda gpu: gpu.vram_bytes):
        for name in (gpu.name, *gpu.aliases):
            families.setdefault(_family_and_gigabytes(name)[0], []).append(gpu)
    return families


_BY_FAMILY = _families()


def find_gpu(name: str) -> Gpu:
    """The card of that name, in any case, with or without spaces, hyphens and the vendor's words.

    A name that several memory sizes share ("A100") means the smallest, unless it says which ("A100 80GB").
    Names as CUDA reports them ("NVIDIA A100-SXM4-80GB") are understood. Raises UserError for an unknown one.
    """
    family, gigabytes = _family_and_gigabytes(name)
    variants = _BY_FAMILY.get(family)
    if variants is None:
        raise UserError(_unknown(name, family))
    if gigabytes is None:
        return variants[0]
    for gpu in variants:
        if abs(gpu.vram_bytes / GIB - gigabytes) <= _SIZE_TOLERANCE * gigabytes:
            return gpu
    have = ", ".join(f"{gpu.name} ({format_bytes(gpu.vram_bytes)})" for gpu in variants)
    raise UserError(f"no {name!r} is known; with that name there is: {have}")


def _unknown(name: str, family: str) -> str:
    close = difflib.get_close_matches(family, list(_BY_FAMILY), n=3, cutoff=0.6)
    meant = ", ".join(dict.fromkeys(gpu.name for key in close for gpu in _BY_FAMILY[key]))
    hint = f" Did you mean: {meant}?" if meant else ""
    names = ", ".join(gpu.name for gpu in GPUS)
    return f"unknown GPU {name!r}.{hint} Known: {names}. A size does as well, such as 3.5GB or 400MiB."


_UNITS = {
    "": 1, "b": 1, "byte": 1, "bytes": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """A size in bytes: "400MiB", "1 GiB", "3.5GB" (GB is 1000^3, GiB 1024^3), "419430400".

    Raises UserError for anything else, and for a size that is not a whole, positive number of bytes once
    rounded.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].casefold()) if match else None
    if match is None or unit is None:
        raise UserError(f"{text!r} is not a size; write for example 400MiB, 3.5GB, 1GiB or 419430400 (bytes)")
    whole, _, fraction = match[1].replace("_", "").partition(".")
    # In integers: a float would lose bytes of a large number.
    size = int(whole or 0) * unit + (round(int(fraction) * unit / 10 ** len(fraction)) if fraction else 0)
    if size <= 0:
        raise UserError(f"{text!r} is no size to work with; it must be above 0, for example 400MiB")
    return size


def format_bytes(size_bytes: int) -> str:
    """`1342177280` as "1.25 GiB", in the wording of CUDA's messages; below 1 KiB "512 bytes"."""
    if abs(size_bytes) < KIB:
        return f"{size_bytes} bytes"
    for unit, name in ((KIB, "KiB"), (MIB, "MiB")):
        if abs(round(size_bytes / unit, 2)) < KIB:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes / GIB:.2f} GiB"


def parse_gpu_or_bytes(text: str) -> tuple[str, int]:
    """What to emulate: `(label, limit in bytes)`.

    A card's name means the bytes usable on that card, a size exactly that many. Raises UserError.
    """
    if not text.strip():
        raise UserError("nothing to emulate; give a card, such as 'RTX 3050 Ti', or a size, such as 400MiB")
    # "3050 Ti" looks like a number with a unit; a bare number never means a card.
    named = _family_and_gigabytes(text)[0] in _BY_FAMILY and not text.strip().isdecimal()
    if named or _SIZE.fullmatch(text) is None:
        gpu = find_gpu(text)
        return gpu.name, gpu.usable_bytes
    size = parse_bytes(text)
    if size < SMALLEST_LIMIT_BYTES:
        raise UserError(
            f"{text!r} means {size} bytes, and a budget has at least {format_bytes(SMALLEST_LIMIT_BYTES)}; "
            f"give a unit, such as {text.strip()}MiB, or a card's whole name, such as 'RTX 4090'"
        )
    return format_bytes(size), size
