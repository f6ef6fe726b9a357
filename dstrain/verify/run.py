"""All checks of a model, in order: each gives a result, also where it ends with an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from dstrain.errors import UsageError, one_line
from dstrain.verify.adapters import check_lora, check_quantized
from dstrain.verify.exports import check_export, check_names, check_resized_embeddings, check_tied_embeddings
from dstrain.verify.model import ShrunkModel
from dstrain.verify.result import CheckResult
from dstrain.verify.router import check_router
from dstrain.verify.rows import check_left_padding, check_packed_rows, check_padded_rows, check_shared_prompts
from dstrain.verify.zero import STAGES, check_zero

Check = Callable[[ShrunkModel], CheckResult | Sequence[CheckResult]]
CHECKS: Mapping[str, Check] = {
    "padded rows": check_padded_rows,
    "left padding": check_left_padding,
    "packed rows": check_packed_rows,
    "shared prompts": check_shared_prompts,
    "router loss": check_router,
    "LoRA adapters": check_lora,
    "quantized base": check_quantized,
    "tied embeddings": check_tied_embeddings,
    "resized embeddings": check_resized_embeddings,
    "export reloaded": check_export,
    "names, shapes, dtypes": check_names,
    " and ".join(f"ZeRO {stage}" for stage in STAGES): check_zero,
}


def run_checks(shrunk: ShrunkModel, report_line: Callable[[str], None] = lambda _: None) -> Iterator[CheckResult]:
    """Yield the result of every check; `report_line` gets the name of each before it starts."""
    for name, check in CHECKS.items():
        report_line(name)
        start = time.monotonic()
        try:
            made = check(shrunk)
        except UsageError as error:  # dstrain refuses it by name, before a run starts
            made = CheckResult(check=name, state="refused", reason=one_line(str(error)))
        except Exception as error:  # of the family's code or of a library: a run would end with it
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            made = CheckResult(check=name, state="failed", reason=reason[:300])
        results = [made] if isinstance(made, CheckResult) else made
        seconds = (time.monotonic() - start) / len(results)
        yield from (replace(result, seconds=seconds) for result in results)
