"""The texts by which a memory failure is known where its type does not tell.

Libraries raise plain RuntimeErrors, so texts must be read; but a text may also quote an old failure, warn
of a possible one, or merely contain the letters. Three strengths are kept apart:

- *marks*: names that stand for nothing else (`CUDA_ERROR_OUT_OF_MEMORY`, `CUBLAS_STATUS_ALLOC_FAILED`).
  They count anywhere outside of quotation marks;
- *phrases*: ordinary words ("out of memory", "failed to allocate 2 GiB", "OOM when allocating"). They
  count only where they assert: close to the start of a clause, and not among words such as "earlier",
  "if", "retrying" or "recovered";
- *ambiguous* library errors, which are a lack of memory or a bug: free memory decides.

All matching ignores case. Texts that went through `repr` may hold a written-out backslash-n; it is read
as the line end that it was.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from foxray.oom.incident import Kind

_SIZE = r"\d[\d,]*(?:\.\d+)?\s*(?:bytes?|[KMGTPE]i?B?|B)\b"


@dataclass(frozen=True)
class Family:
    """Texts that mean one thing. `needles` (lower case) keep ordinary texts from the slow search: one of
    them is in every text that could match."""

    needles: tuple[str, ...]
    pattern: re.Pattern[str]

    def search(self, text: str) -> re.Match[str] | None:
        """The first place in `text`, in any letter case."""
        return self.pattern.search(text) if self._near(text) else None

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        """The first few places in `text`, in any letter case."""
        return islice(self.pattern.finditer(text), _MOST_PLACES) if self._near(text) else iter(())

    def _near(self, text: str) -> bool:
        lowered = text.lower()
        return any(needle in lowered for needle in self.needles)


def _any(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE)


def _family(*alternatives: str, needles: str) -> Family:
    return Family(tuple(needles.split("|")), _any(*alternatives))


_READ_AT_EACH_END = 4000
_NEEDLES = ("memory", "oom", "alloc", "cuda", "hip", "bus error", "torch_", "shm", "paging file")
_LOOK_BACK = 400
_MOST_PLACES = 20

HOST_MARKS = _family(
    r"DefaultCPUAllocator",
    r"\bstd::bad_alloc\b",
    r"\b(?:UR|ZE)_RESULT_ERROR_OUT_OF_HOST_MEMORY\b",
    r"^\W*\[Errno 12\]",
    r"\bCannot allocate memory\b(?! in static TLS)",
    r"\bNODE_OUT_OF_MEMORY\b",
    rf"\bunable to allocate {_SIZE} for an array\b",
    r"\bthe paging file is too small\b",
    needles="alloc|memory|paging",
)

DEVICE_MARKS = _family(
    r"\bcudaError(?:_t)?[:. ]?(?:MemoryAllocation|MemoryFull|OutOfMemory)\b",
    r"\bhipError(?:OutOfMemory|MemoryAllocation)\b",
    r"(?:\b|(?<!NODE)_)out_of_(?:device_)?memory\b",
    r"\b(?:CU|HIP|ROC|MIOPEN)\w*_(?:ALLOC(?:ATION)?_FAILED|MEMORY_ERROR)\b",
    r"\b(?:cuda|hip)(?: runtime| driver| api)? (?:error|failure)(?: code)?\s*[:=]?\s*[\[(]?2\b"
    r"(?=\s*(?:$|[:;,)\](\n-]|\.(?!\d)|(?:out|in|at|on|while|when|during)\b))",
    r"\bfailed to cuda (?:calloc|malloc)",
    r"\bwould exceed allowed memory\b.{0,3}\(out of memory\)",
    r"\bcu(?:da)?(?:Mem(?:Alloc|Create)|Malloc)\w*(?:\(\))? failed\b",
    r"\bRESOURCE_EXHAUSTED: attempting to (?:reserve|allocate)\b",
    needles="memory|cuda|hip|alloc",
)

NCCL_OUT_OF_MEMORY = _family(r"\b(?:cuda|hip) failure(?: 2)? 'out of memory'", needles="failure")
"""NCCL puts the driver's words in quotation marks, so this one is searched in the whole text."""

SHM_MARKS = _family(
    r"\bis killed by signal: bus error\b",
    r"\bbus error encountered in worker\b",
    r"\binsufficient shared memory\b",
    r"\b(?:unable to|could not) \w[^<\n]{0,60}</?torch_[^>]*>.*(?:no space left|cannot allocate memory)",
    r"\bno space left on device\b.*/dev/shm\b",
    r"/dev/shm\b.*\bno space left on device\b",
    needles="bus error|shared memory|no space left|/torch_|<torch_",
)

LOADER_KILLED = _family(
    r"\bworker \(pid \d+\) is killed by signal\b",
    r"\bbus error encountered in worker\b",
    needles="killed by signal|bus error",
)

RAY_KILLED = _family(
    r"\bkilled due to (?:the )?node running low on memory\b", r"\bNODE_OUT_OF_MEMORY\b", needles="memory"
)
"""Ray's memory monitor, in the text of one of Ray's own exceptions."""

_PHRASE = _family(
    r"\bout[ -]of[ -]memory\b(?! (?:killer|handler|recovery|errors\b))",
    r"\bmemory allocation (?:has )?fail(?:ed|ure)\b",
    r"\b(?:failed|unable) to allocate\b"
    rf"(?=\W*$|[^.\n]{{0,60}}?(?:{_SIZE}|memory|tensor|buffer|workspace|storage))",
    rf"\bnot enough memory\b(?=\W*$|[:,] you tried to allocate|[^.\n]{{0,40}}?{_SIZE})",
    needles="memory|allocate",
)
_OOM_WORD = _family(r"\boom\b", needles="oom")
_OOM_DEED = re.compile(
    r" (?:when|while|during|trying|allocating|on allocat\w+|in (?:forward|backward))\b", re.IGNORECASE
)
_OOM_END = re.compile(r"(?: (?:error|exception|detected|occurred|on|in|at)\b|[:.!,]|\W*$)", re.IGNORECASE)
_OOM_LEAD = _any(
    r"cuda|hip|xpu|mps|gpu|device|host|cpu|vram|memory|got|hit|an?|fatal|runtime|error|failed|with|due|to",
    r"worker|rank|step|job|training|validation|calibration|\d+",
)
_WORD = re.compile(r"\w+")
_CLAUSE_START = re.compile(r"[\n:;(]|[.!?,]\s|\s-\s")
_SENTENCE_END = re.compile(r"\n|[.!?](?:\s|$)")
_MOST_LEAD_WORDS = 6
_OVER = _any(
    r"\b(?:recover\w*|retry\w*|retried|resolved|survived|handled|ignored|earlier|previous\w*|past|last|old)\b"
)
_NOT_NOW = _any(
    r"\b(?:if|when|may|might|could|would|should|avoid\w*|prevent\w*|no|not|never|after|like|such|about|called|says?|said|logs?)\b"
)
_REPORTS = _any(r"\b(?:logs?|lines?|history|hints?|tips?|notes?|see|earlier|previous\w*|recovered)\W*$")
_QUOTED = re.compile(r"https?://\S+|(?<!\w)(['\"`])(?:(?!\1)[^\n])*?\1(?!\w)", re.IGNORECASE)
_FRAME = re.compile(r"^(?: {2,}|\t).*\n?", re.MULTILINE)
_HOST_WORDS = _any(r"\bcpu\b", r"\bhost\b", r"\bram\b", r"\b(?:mkl)?cpu\b")
_DEVICE_WORDS = _any(
    r"\bcuda\w*",
    r"\bhip\b",
    r"\bxpu\b",
    r"\bmps\b",
    r"\bgpu\b",
    r"\bvram\b",
    r"\brocm\b",
    r"\bnccl\w*",
    r"\bhbm\b",
)

AMBIGUOUS = _family(
    r"\bCUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)\b",
    r"\bCUDNN_STATUS_(?:INTERNAL_ERROR(?:_\w+)?|NOT_INITIALIZED|NOT_SUPPORTED)\b",
    r"\bCUSOLVER_STATUS_(?:INTERNAL_ERROR|NOT_INITIALIZED)\b",
    r"\bunable to find (?:a valid cuDNN algorithm|an engine to execute this computation)\b",
    r"\bNVML_SUCCESS == r\b.*\bINTERNAL ASSERT FAILED\b",
    r"\bncclUnhandledCudaError\b",
    r"\bunhandled cuda error\b",
    needles="_status_|unable to find|nvml_success|unhandled|ncclunhandled",
)

IMPOSSIBLE = _family(
    r"\bstorage size calculation overflowed\b",
    r"\bmore than 1 ?EB\b",
    r"\bnumel: integer multiplication overflow\b",
    r"\balloc_cpu\(\) seems to have been called with negative number\b",
    r"\barray is too big\b",
    r"\bmaximum allowed dimension exceeded\b",
    needles="overflow|eb|negative number|too big|dimension exceeded",
)

CONTEXT_LOST = _family(
    r"\bdevice-side assert triggered\b",
    r"\ban illegal (?:memory access|instruction) was encountered\b",
    r"\bunspecified launch failure\b",
    r"\b(?:CUDA|HIP) error: misaligned address\b",
    r"\bthe launch timed out and was terminated\b",
    r"\b(?:CUDA|HIP) error: (?:invalid program counter|hardware stack error|context is destroyed)",
    r"\boperation not supported on global/shared address space\b",
    r"\buncorrectable (?:ECC|NVLink) error\b",
    r"\bcudaError(?:Assert|IllegalAddress|IllegalInstruction|LaunchFailure|LaunchTimeout|MisalignedAddress"
    r"|ECCUncorrectable|HardwareStackError|InvalidPc|InvalidAddressSpace|ContextIsDestroyed)\b",
    r"\bCUDA_ERROR_(?:ASSERT|ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS"
    r"|ECC_UNCORRECTABLE|HARDWARE_STACK_ERROR|INVALID_PC|INVALID_ADDRESS_SPACE|CONTEXT_IS_DESTROYED)\b",
    needles="cuda|hip|assert|illegal|launch|address|uncorrectable",
)
"""Errors after which every call into the CUDA context fails, until the process ends."""

BROKEN_COLLECTIVE = _family(
    r"\bconnection (?:was )?(?:reset|closed|refused) by (?:remote )?peer\b",
    r"\bgloo\b.*\b(?:connection|connect|timed out|read error|write error|broken pipe|socket closed)\b",
    r"\bnccl(?:RemoteError|SystemError|InternalError|UnhandledCudaError)\b",
    r"\bNCCL error\b",
    r"\bNCCL communicator was aborted\b",
    r"\bWatchdog caught collective operation timeout\b",
    r"\bTimed out waiting \d+ms for (?:recv|send) operation\b",
    r"\b(?:application timeout caused pair closure|socket timeout)\b",
    needles="connection|gloo|nccl|watchdog|timed out|timeout",
)


def plain(text: str) -> str:
    """The text with written-out line ends made real."""
    return text.replace("\\n", "\n").replace("\\N", "\n")


def skimmed(text: str) -> str:
    """The text, `plain`; of a huge one (a whole log) only beginning and end, where the news stands."""
    if len(text) > 2 * _READ_AT_EACH_END:
        text = f"{text[:_READ_AT_EACH_END]}\n{text[-_READ_AT_EACH_END:]}"
    return plain(text)


def failed_memory(text: str) -> Kind | None:
    """Which memory this text (already `skimmed`) says ran out, if it says so for certain."""
    if not _worth_a_look(text):
        return None
    if SHM_MARKS.search(text):
        return "shm"
    if NCCL_OUT_OF_MEMORY.search(text):
        return "device"
    own = _own_words(text)
    if any(_is_current(own, found) for found in DEVICE_MARKS.finditer(own)):
        return "device"
    if any(_is_current(own, found) for found in HOST_MARKS.finditer(own)):
        return "host"
    for found in _PHRASE.finditer(own):
        if _asserts(own, found):
            return _kind_near(own, found)
    for found in _OOM_WORD.finditer(own):
        if _asserts(own, found) and _allocates(own, found):
            return _kind_near(own, found)
    return None


def _worth_a_look(text: str) -> bool:
    lowered = text.lower()
    return any(needle in lowered for needle in _NEEDLES)


def _own_words(text: str) -> str:
    """The text without addresses, passages in quotation marks, and source lines of a traceback."""
    if "Traceback (most recent call last)" in text:
        text = _FRAME.sub("", text)
    return _QUOTED.sub("", text)


def _clause_start(text: str, found: re.Match[str]) -> int:
    back = max(0, found.start() - _LOOK_BACK)
    starts = [separator.end() for separator in _CLAUSE_START.finditer(text, back, found.start())]
    return starts[-1] if starts else back


def _lead(text: str, found: re.Match[str]) -> str:
    """The words of the clause before the match."""
    return text[_clause_start(text, found) : found.start()]


def _rest(text: str, found: re.Match[str]) -> str:
    """The words of the sentence after the match."""
    end = _SENTENCE_END.search(text, found.end())
    return text[found.end() : end.start() if end else len(text)]


def _is_current(text: str, found: re.Match[str]) -> bool:
    return not _OVER.search(_lead(text, found)) and not _OVER.search(_rest(text, found))


def _asserts(text: str, found: re.Match[str]) -> bool:
    lead = _lead(text, found)
    line = text[text.rfind("\n", 0, found.start()) + 1 : _clause_start(text, found)]
    return (
        len(lead.split()) <= _MOST_LEAD_WORDS
        and not _NOT_NOW.search(lead)
        and _is_current(text, found)
        and not _REPORTS.search(line)
    )


def _allocates(text: str, found: re.Match[str]) -> bool:
    """Whether "OOM" is said of an allocation: by what follows, or because it is all that the line says."""
    if _OOM_DEED.match(text, found.end()):
        return True
    line_start = text.rfind("\n", 0, found.start()) + 1
    lead = _WORD.findall(text[line_start : found.start()])
    return all(map(_OOM_LEAD.fullmatch, lead)) and bool(_OOM_END.match(text, found.end()))


def _kind_near(text: str, found: re.Match[str]) -> Kind:
    """Plain words name the memory they mean nearby; the device is meant where they do not."""
    near = f"{_lead(text, found)} {_rest(text, found)}"
    return "host" if _HOST_WORDS.search(near) and not _DEVICE_WORDS.search(near) else "device"
