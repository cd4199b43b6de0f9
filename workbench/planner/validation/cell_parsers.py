"""What the cells of a table of measurements say: numbers, yes or no, dtypes, recompute, sharding,
kinds of memory.

Cells are written by people. Each function takes the text as it stands and answers with a value, or
None where the text is empty, says "unknown" or cannot be read; none of them raises.
"""

from __future__ import annotations

import math
import re

from workbench.units import GIB

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_FIRST_NUMBER = re.compile(_NUMBER)
_RANGE = re.compile(rf"^\D{{0,3}}({_NUMBER})\s*\w{{0,3}}?\s*(?:-|–|—|\.\.+|to)\s*({_NUMBER})")
_MAX_NUMBER = 1e18
_UNKNOWN = re.compile(
    r"\b(see|not (in|on|read|stated|printed|given|known)|unknown|unstated|unclear|n/?a|"
    r"none stated|tbd)\b|^[-?]*$"
)
GIB_OF_GB = 1e9 / GIB
YES_NO = {"yes": True, "true": True, "y": True, "on": True, "1": True} | dict.fromkeys(
    ("no", "false", "n", "off", "0", "none"), False
)


def parse_number(text: str) -> float | None:
    """The number in `text`, at least 0; the middle of a range; None where there is none."""
    if span := _RANGE.match(text):
        low, high = (float(part.replace(",", "")) for part in span.groups())
        value = (low + high) / 2 if 0 <= low <= high else low
    elif found := _FIRST_NUMBER.search(text):
        value = float(found.group().replace(",", ""))
    else:
        return None
    return value if math.isfinite(value) and 0 <= value < _MAX_NUMBER else None


def plain_number(text: str) -> float | None:
    """The number that `text` is and nothing else, of any sign; None for words, ranges and units."""
    if re.fullmatch(_NUMBER, text.strip()) is None:
        return None
    value = float(text.strip().replace(",", ""))
    return value if math.isfinite(value) else None


def integer(text: str) -> int | None:
    """The integer in `text`; None for a range, a fraction or nothing. `8k` is 8192."""
    value = None if _RANGE.match(text) else parse_number(text)
    if value is not None and re.search(r"\d\s*k\b", text.lower()):
        value *= 1024
    return int(value) if value is not None and value == int(value) else None


def positive_integer(text: str) -> int | None:
    """A positive integer, or None."""
    return integer(text) or None


def yes_or_no(text: str) -> bool | None:
    """Yes or no; None where the text says neither."""
    word = re.match(r"\s*(\w+)", text.lower())
    if word is None:
        return None
    return YES_NO.get(word.group(1))


def is_unknown(text: str) -> bool:
    """Whether the text is empty or only says that nothing is known ("see recipe", "not in
    table").
    """
    return _UNKNOWN.search(text.strip().lower()) is not None


def duration_seconds(text: str) -> float | None:
    """A duration in seconds; a trailing `ms` is honoured."""
    value = parse_number(text)
    return value / 1000 if value and re.search(r"\d\s*ms\b", text.lower()) else value or None


def memory_gib(text: str, unit: str) -> float | None:
    """Memory in GiB. "GB" acts as GiB, as drivers and loggers print it, unless the unit speaks of
    1e9 bytes.
    """
    value, unit = parse_number(text), (unit + " " + text).lower()
    if not value:
        return None
    if re.search(r"1e9|10\^9|10\*\*9|1000\^3|decimal", unit):
        return value * GIB_OF_GB
    leading = re.match(r"\W*(mib|mb)\b", unit) or re.search(r"\d\s*(mib|mb)\b", text.lower())
    return value / 1024 if leading else value


def is_flagged_by_source(text: str) -> bool:
    """Whether a table warns of a row: noise, throttled GPUs, labels mixed up, figures that
    contradict each other.
    """
    return _WARNING.search(text.lower()) is not None


_WARNING = re.compile(
    r"\bnois|warns|throttl|power.?limited|mislabel|mixed up|not proportional|inconsistent|"
    r"duplicate config|unreliable"
)


def is_bare_gb(unit: str) -> bool:
    """Whether a unit is a bare GB that does not say what it is."""
    return re.search(r"\bgb\b", unit.lower()) is not None and not re.search(
        r"gib|mib|\bmb\b|1e9|10\^9|10\*\*9|decimal|1024|2\^30|rounded", unit.lower()
    )


def _words(text: str) -> str:
    """A cell in lower case, whose words underscores separate too."""
    return text.strip().lower().replace("_", " ")


def memory_kind(text: str) -> str:
    """allocated | reserved | nvidia-smi | unknown. A text that names two, or doubts its own, is
    unknown.
    """
    text = _words(text)
    if re.search(r"nvidia.?smi|nvml", text) and "not stated" not in text:
        return "nvidia-smi"
    said = [kind for kind in ("allocated", "reserved") if re.search(rf"\b{kind}\b", text)]
    return said[0] if len(said) == 1 and "not stated" not in text else "unknown"


def nearest_memory_kind(text: str) -> str:
    """allocated | reserved | nvidia-smi | unknown by the first word that speaks of one, doubts
    aside.

    What torch calls active it has handed out.
    """
    words = {"allocated": "allocated", "active": "allocated", "reserved": "reserved"}
    found = re.search(r"allocated|active|reserved|nvidia.?smi|nvml", text.lower())
    return words.get(found.group(), "nvidia-smi") if found else "unknown"


def report_year(text: str) -> float | None:
    """When a report was made, its month as hundredths, where its name says so: `h100_202412.md` is
    2024.12, `26.06 NeMo Container` 2026.06, one that follows it, `26.06.01`, 2026.0601, and
    arXiv 2205.05198 2022.05.
    """
    found = (
        re.search(r"(?<!\d)20([12]\d)[-_]?(0[1-9]|1[0-2])(?!\d)", text)
        or _RELEASE.search(text)
        or _ARXIV.search(text)
    )
    if found is None:
        return None
    again = int(found.groupdict().get("again") or 0)
    return 2000 + int(found.group(1)) + (100 * int(found.group(2)) + again) / 10_000


_ARXIV = re.compile(r"(?<![\d.])(2\d)(0[1-9]|1[0-2])\.\d{5}(?!\d)")
_RELEASE = re.compile(
    r"\b(2\d)\.(0[1-9]|1[0-2])(?:\.(?P<again>\d\d))?(?= (?:nemo|container))", re.IGNORECASE
)


RUN_STATUSES = "ok, OOM or failed (words may follow), or an empty cell"
"""What a cell of a run's status may say."""
_RAN = re.compile(
    r"(ok(ay)?|ran|runs|success\w*|succeeded|completed?|finished|done|pass(ed)?|fits)\b"
)


def run_status(text: str, measured: bool) -> str | None:
    """ran | out_of_memory | failed; None where the words say none of them. A failure that may have
    been something else than memory is `failed`.
    """
    text = _words(text)
    short = re.search(r"\boom\b|out[ -]of[ -]memory|does ?n.t fit|does not fit", text)
    other = re.search(r"fail|crash|timeout|timed out|error|hang|\bnan\b|diverge|killed", text)
    if short:
        return "failed" if other else "out_of_memory"
    if other:
        return "failed"
    if _RAN.match(text):
        return "ran"
    if not is_unknown(text):
        return None
    return "ran" if measured else "failed"


def narrowest_precision(text: str) -> str | None:
    """fp32 | tf32 | bf16 | fp16 | fp8 | mxfp8 | nvfp4 | fp4 by the narrowest dtype that matrix
    products are said to use.
    """
    text = text.lower()
    for name, pattern in (
        ("nvfp4", r"nvfp4"),
        ("fp4", r"fp4|float4"),
        ("mxfp8", r"mx.?fp8|fp8.?mx|mx.?float8"),
        ("fp8", r"fp8|float8|e4m3|e5m2"),
        ("bf16", r"bf16|bfloat16"),
        ("fp16", r"fp16|float16|half"),
        ("tf32", r"tf32"),
        ("fp32", r"fp32|float32|single|32.true"),
    ):
        if re.search(pattern, text):
            return name
    return None


def updates_16bit_weights(text: str) -> bool:
    """Whether the optimizer updates 16-bit weights themselves: "bf16-true", "pure bf16", "bf16
    weights".
    """
    return re.search(r"\b(pure|true)\b|16 (weights|params)\b|16.true", _words(text)) is not None


def gradient_dtype(text: str) -> str | None:
    """fp32 where gradients are said to add up or be reduced in it, else None."""
    said = re.search(
        r"fp32 (grad|main grad|reduce|accum)|(accum\w*|reduce\w*|grad\w*) in fp32", text.lower()
    )
    return "fp32" if said else None


def moments_dtype(text: str) -> str | None:
    """Dtype of the optimizer's moments where it is said: int8, bf16 or fp32; else None."""
    text = text.lower()
    if re.search(r"8.?bit (adam|optim)|adamw?_?8.?bit", text):
        return "int8"
    if re.search(r"bf16 (adam|m/v|moments|optim)|(adamw?|moments|states) (in )?bf16", text):
        return "bf16"
    return None


def trains_adapters(text: str) -> bool:
    """Whether low-rank adapters are trained; `kv_lora_rank` is a width of latent attention."""
    return "lora" in re.sub(r"\b(kv|q)[-_ ]lora[-_ ]rank", "", text.lower())


def is_fused_attention(text: str) -> bool | None:
    """Whether attention is one fused kernel that keeps no scores; None where the words do not say.

    "flash", "cudnn", "sdpa", "te" are; "no flash", "eager", "sdpa math" and a fused softmax alone
    are not.
    """
    text = _words(text)
    if is_unknown(text):
        return None
    rest, negated = _UNFUSED.subn(" ", text)
    if re.search(
        r"flash|cudnn|sdpa|fused|xformers|mem\w*[- ]efficient|\b(te|transformer.?engine|"
        r"fa-?[234])\b",
        rest,
    ):
        return True
    return False if negated or re.search(r"\b(eager|naive|vanilla|math)\b", rest) else None


_FUSED_WORDS = r"(flash|fused|cudnn|xformers)(?:[-_ ]?(?:attn|attention))?(?:[-_ ]?[234])?"
_UNFUSED = re.compile(
    rf"\b(?:no|non|not|without|w/o)[- ]+(?:using )?{_FUSED_WORDS}\b|\bun-?fused\b"
    rf"|\b{_FUSED_WORDS}\s*(?:is )?[=:(]?\s*(?:off|no|not used|false|disabled)\b"
    r"|\bfused(?:[- ](?:scale\w*|mask\w*))*[- ]softmax\b|\bsdpa\W*math\b"
)


def recompute_kind(text: str, layers: int) -> str | list[int] | None:
    """none | selective | full | the layers recomputed in full; None where the text does not say."""
    text = _words(text)
    if is_unknown(text):
        return None
    if every := re.search(r"every (\d+|other|second|2nd|third|3rd)", text):
        step = {"other": 2, "second": 2, "2nd": 2, "third": 3, "3rd": 3}.get(
            every.group(1)
        ) or parse_number(every.group(1))
        return list(range(0, layers, max(1, int(step or 2))))
    if re.match(r"(none|no|off|false|disabled)\b", text):
        return "none"
    if re.search(
        r"select|core.?attn|per.?op|recompute-(?!block)|\bsac\b|mlp|attention|norm|partial", text
    ):
        return "selective"
    if re.search(r"\b(full|yes|true|on|block|uniform|all|layer|checkpoint\w*)\b|activation", text):
        return "full"
    return None


def zero_stage(stage: str, sharding: str) -> int | None:
    """ZeRO stage: the number given, else what the sharding's words mean; None where neither
    says.
    """
    given = integer(stage)
    if given in (0, 1, 2, 3):
        return given
    text = sharding.lower()
    if is_unknown(text):
        return None
    if named := re.search(r"zero[- _]?(?:stage)?[- _]?([0-3])\b", text):
        return int(named.group(1))
    for value, pattern in (
        (2, r"shard_grad_op|^(?!.*shard.?weight).*shard.?grad|fsdp ?0\.5"),
        (3, r"full_?shard|hsdp|hybrid|fsdp|shard.?weight|fully"),
        (1, r"distributed optim|dist.?opt|optimizer shard|shard\w* optim"),
        (0, r"\bddp\b|none|no\b|data parallel"),
    ):
        if re.search(pattern, text):
            return value
    return None


def shard_group_size(text: str) -> int | None:
    """Ranks of a shard group where sharding is said to stay inside one ("within group of 8", "FSDP
    64").
    """
    found = re.search(r"(?:within|group of|groups of|fsdp[ =])\D{0,12}(\d+)", text.lower())
    return positive_integer(found.group(1)) if found else None


def is_hybrid_sharded(text: str) -> bool:
    """Whether parameters are sharded inside a node and replicated across nodes."""
    return re.search(r"hsdp|hybrid", text.lower()) is not None


def offload_kind(text: str) -> str:
    """none | optimizer | parameters: what the words say lives in host memory. Activations there are
    another matter.

    Master weights there are the optimizer's, but where working weights are sharded and made from
    them again.
    """
    clauses = [clause for clause in re.split(r"[;.]\s|[;,]", text.lower()) if "offload" in clause]
    rest = " ".join(clause for clause in clauses if not _NOT_OFFLOADED.search(clause))
    rest = _ACTIVATIONS_OFFLOADED.sub("", rest)
    if re.search(
        r"offload[- ](param|quant)|param\w* offload|(full|zero-?3) \+? ?(full )?offload|"
        r"offload\w* (of )?all",
        rest,
    ):
        return "parameters"
    if re.search(r"offload[- ]master", rest) and re.search(r"shard\W?weights", text.lower()):
        return "parameters"
    return "optimizer" if "offload" in rest else "none"


_NOT_OFFLOADED = re.compile(
    r"not (stated|known|used)|unknown|\b(no|without)\b|offload\w*\s*[=:]\s*(false|no|none|0)\b|"
    r"do(es)? not fit|tops out"
)
_ACTIVATIONS_OFFLOADED = re.compile(
    r"act\w*[- ](cpu[- ])?offload\w*|-*offload[- ](residual|act)\w*"
)


_FUSED_LOSS = re.compile(
    r"fused[\s_-]*(?:\w+[\s_-]+)?(?:cross[\s_-]?entropy|ce\b)"
    r"|cross[\s_-]?entropy[\s_-]*(?:loss[\s_-]*)?(?:fusion|fused)"
)
_FLAGS_BEFORE_COMPILE = r"cumulative flags: (?:baseline|\+ packed)\b"
_FLAGS_BEFORE_CHUNKS = re.compile(r"cumulative flags: (?:baseline|\+ (?:packed|compile))\b")
_ALL_TO_ALL_CONTEXT = re.compile(
    r"ulysses|\bcp[\s_-]*(?:comm[\s_-]*type)?[\s=:_-]*(?:a2a|all.to.all)"
    r"|(?:a2a|all.to.all)[\s_-]*(?:cp\b|context parallel)"
)


def attention_generation(text: str) -> str | None:
    """The generation of fused attention that a row's words name, as `strategy.attention` does."""
    found = re.search(r"\b(?:flash\w*[- ]?(?:attention|attn)?|fa)[-_ ]?v?([1-4])\b", text.lower())
    return f"flash-{found.group(1)}" if found else None


def says_fused_head(words: str) -> bool:
    """True where a row's words say that head and loss are one operator, as Liger-Kernel's are."""
    return bool(re.search(r"\bliger\b|fused[\s_-]*linear", words.lower()))


def says_fused_loss(words: str) -> bool:
    """Whether a row's words say that its cross entropy is fused."""
    return bool(_FUSED_LOSS.search(words.lower()))


def says_whole_loss(words: str) -> bool:
    """Whether a row of a table whose flags add up stands before the one that chunks its cross
    entropy: torchtune's are baseline, packed, compile and chunked cross entropy, in this order.
    """
    return bool(_FLAGS_BEFORE_CHUNKS.search(words.lower()))


def says_all_to_all_context(words: str) -> bool:
    """Whether a row's words say that context ranks exchange heads by all-to-alls."""
    return bool(_ALL_TO_ALL_CONTEXT.search(words.lower()))


def kernels(text: str) -> str | None:
    """How operators run, by a row's framework and notes; None where they do not say.

    "Eager" of its attention says nothing of the others. Of cumulative flags (torchtune's README,
    Optimization flags) `+ Compile` is the second, and on in all that follow.
    """
    text = text.lower()
    if re.search(r"\bliger\b", text):
        return "liger"
    if re.search(r"compile|thunder|inductor", text):
        return "compiled"
    if "cumulative flags:" in text and not re.search(_FLAGS_BEFORE_COMPILE, text):
        return "compiled"
    return "eager" if re.search(r"\beager\b", _words(text)) else None
