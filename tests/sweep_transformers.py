"""Every model class of transformers on flashvar against eager attention, tiny and on the CPU.

python tests/sweep_transformers.py            # writes tests/transformers_sweep.txt
python tests/sweep_transformers.py --only 'Bert|llama'    # prints some
"""

from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from small_models import CACHE
from tiny_transformers import BATCH, LENGTH, classes, inputs, made
from transformers import AttentionInterface

from flashvar.errors import FlashvarError
from flashvar.integrations import fallback
from flashvar.integrations import transformers as integration
from flashvar.integrations.transformers import attention as transformers_attention

TABLE = Path(__file__).with_name("transformers_sweep.txt")
SECONDS = 120
TOGETHER = 100
FILL = LENGTH // 3
MASKS = ("attention_mask", "decoder_attention_mask")


class Outcome(NamedTuple):
    """What became of a class, and which comparisons it passed or why not."""

    word: str
    why: str


class DifferenceError(Exception):
    """A result that is not eager's."""


class TimeIsUpError(BaseException):
    """A class that takes too long; nothing else catches it."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every floating-point tensor of an output, but for caches and attention weights."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            if name not in (CACHE, "loss") and not name.endswith("attentions"):
                yield from tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def run(model: Any, given: dict[str, Any], gradients: bool = False) -> list[torch.Tensor]:
    """The output, and the gradients of all parameters for a weighted sum of it."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        found = list(tensors(model(**copy.deepcopy(given))))
    if not gradients:
        return found
    kept = [one for one in found if one.requires_grad]
    if kept:
        generator = torch.Generator().manual_seed(4)
        total = sum((one * torch.randn(one.shape, generator=generator)).mean() for one in kept)
        total.backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [one.detach() for one in found] + grads


def compare(
    what: str, found: list[torch.Tensor], expected: list[torch.Tensor], rows: Any = None
) -> None:
    """Raise DifferenceError; `rows` [batch, length] says which tokens of a text are no padding."""
    if len(found) != len(expected):
        raise DifferenceError(f"{what}: {len(found)} tensors, eager {len(expected)}")
    # A gradient that is 0, as that of the bias of keys, is as inexact as what cancels out in it.
    noise = torch.finfo(torch.float32).eps * max(
        (float(one.abs().nan_to_num(0, 0, 0).max()) for one in expected if one.numel()), default=0.0
    )
    for one, want in zip(found, expected, strict=True):
        if one.shape != want.shape:
            raise DifferenceError(f"{what}: shape {tuple(one.shape)}, eager {tuple(want.shape)}")
        if rows is not None and want.shape[:2] == rows.shape:
            one, want = one[rows], want[rows]
        elif rows is not None:
            # It may be pooled from a token that is padding: the first of the batch has none.
            first = tuple(slice(1 if size == BATCH else None) for size in want.shape)
            one, want = one[first], want[first]
        if not want.isfinite().all():
            continue
        largest = float(want.abs().max()) if want.numel() else 0.0
        error = float((one - want).abs().max()) if want.numel() else 0.0
        if not error <= 1e-4 + noise + 2e-3 * largest:
            raise DifferenceError(f"{what}: off by {error:.2g} of {largest:.2g}")


def padding(side: str) -> torch.Tensor:
    """A mask [batch, length] with a third of the second row filled up."""
    mask = torch.ones((BATCH, LENGTH), dtype=torch.long)
    mask[1, slice(FILL) if side == "left" else slice(-FILL, None)] = 0
    return mask


def checks(pair: tuple[Any, Any], given: dict[str, Any]) -> Iterator[str]:
    """The comparisons passed by a pair of models, eager and on flashvar."""
    eager, ours = pair
    try:
        plain = run(eager, given, True)
    except Exception:  # the model has no gradients
        plain = []
    if not plain or not all(one.isfinite().all() for one in plain):
        compare("plain", run(ours, given), run(eager, given))
        yield "plain"
    else:
        compare("gradients", run(ours, given, True), plain)
        yield "gradients"
    ids = given.get("input_ids")
    if ids is None or ids.shape != (BATCH, LENGTH):
        return
    for side in ("left", "right"):
        mask = padding(side)
        filled = ids.masked_fill(mask == 0, getattr(eager.config, "pad_token_id", None) or 0)
        masked = {**given, "input_ids": filled, "attention_mask": mask}
        try:
            expected = run(eager, masked)
        except Exception:  # takes no such mask
            break
        rows = None if "decoder_input_ids" in given else mask.bool()
        compare(side, run(ours, masked), expected, rows)
        yield side
    yield from causality(eager, ours, given)
    yield from cached(eager, ours, given)
    yield from packed(eager, ours, given)


def causality(eager: Any, ours: Any, given: dict[str, Any]) -> Iterator[str]:
    """Whether the first token depends on the last one: not, if it does not on eager."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    other = {**given, name: given[name].clone()}
    other[name][:, -1] = 3

    def first(model: Any, what: dict[str, Any]) -> list[torch.Tensor]:
        return [one[:, 0] for one in run(model, what) if one.shape[:2] == (BATCH, LENGTH)]

    try:
        before, after = first(eager, given), first(eager, other)
    except Exception:  # wants that very token
        return
    if before and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(before, after, strict=True)):
        compare("causal", first(ours, other), first(ours, given))
        yield "causal"


def cached(eager: Any, ours: Any, given: dict[str, Any]) -> Iterator[str]:
    """The last token from a cache of those before it."""
    if "decoder_input_ids" in given or "input_ids" not in given:
        return

    def last(model: Any) -> list[torch.Tensor]:
        first, token = given["input_ids"][:, :-1], given["input_ids"][:, -1:]
        with torch.no_grad():
            kept = model(input_ids=first, use_cache=True).get(CACHE)
            if kept is None:  # bidirectional models fill the cache of generate(), and name none
                kept = transformers.DynamicCache()
                model(input_ids=first, **{CACHE: kept})
                if not kept.get_seq_length():
                    raise ValueError("expected a model that keeps keys and values")
            step = model(input_ids=token, **{CACHE: kept})
        return list(tensors(step))

    try:
        expected = last(eager)
    except Exception:  # takes no cache
        return
    compare("cache", last(ours), expected)
    yield "cache"


def packed(eager: Any, ours: Any, given: dict[str, Any]) -> Iterator[str]:
    """Two sequences in one row, told by positions: each as if alone, or what eager makes of it."""
    first = 5
    ids = given["input_ids"][:1]
    positions = torch.cat((torch.arange(first), torch.arange(LENGTH - first)))[None]
    one = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if "decoder_input_ids" in given:
        return
    try:
        expected = run(eager, one)
        if any(tensor.shape[:2] != (1, LENGTH) for tensor in expected):
            return
        if all(map(torch.equal, expected, run(eager, {"input_ids": ids}))):
            return  # it does not read them
        parts = [run(eager, {"input_ids": part}) for part in (ids[:, :first], ids[:, first:])]
        alone = [torch.cat(pair, 1) for pair in zip(*parts, strict=True)]
    except Exception:  # takes no positions, or pools
        return
    found = run(ours, one)
    try:
        compare("packed", found, alone)
        yield "packed"
    except DifferenceError:
        compare("packed", found, expected)


def eaten(kind: Any) -> tuple[Any, dict[str, Any]]:
    """A small model on eager attention, and what it eats; ValueError: none is known."""
    reasons = []
    for width, complete in ((64, False), (64, True), (512, False), (0, False)):
        try:
            model = made(kind, width, complete)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        for given in inputs(model):
            try:
                if run(model, given):
                    return model, given
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
    raise ValueError(reasons[-1] if reasons else "no inputs known")


def twin(model: Any, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the same weights and buffers that has not run."""
    config = copy.deepcopy(model.config)
    made = type(model)._from_config(config, attn_implementation=implementation).eval().to(dtype)
    made.load_state_dict(model.state_dict())
    with torch.no_grad():
        for one, other in zip(made.buffers(), model.buffers(), strict=True):
            if one.shape == other.shape:
                one.copy_(other)
    return made


def agreed(model: Any, given: dict[str, Any], implementation: str, dtype: torch.dtype) -> str:
    """The comparisons of the model with itself on another attention; none where one fails."""
    given = {
        name: one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for name, one in given.items()
    }
    try:
        pair = (twin(model, implementation, dtype), twin(model, "flashvar", dtype))
        return " ".join(checks(pair, given))
    except Exception:  # it differs, or the model does not take that attention or dtype
        return ""


def judge(kind: Any) -> Outcome:
    """The outcome of a class."""
    try:
        eager, given = eaten(kind)
    except Exception as error:
        return Outcome("not run", str(error))
    said: list[str] = []
    logger, handler = logging.getLogger("flashvar"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    fallback._logged.clear()
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return transformers_attention.attention(*arguments, **options)

    AttentionInterface.register("flashvar", counted)
    passed: list[str] = []
    try:
        pair = [twin(eager, name) for name in ("eager", "flashvar")]
        for name in checks((pair[0], pair[1]), given):
            passed.append(name)
    except FlashvarError as error:
        return Outcome("refused", str(error))
    except ValueError as error:  # some models refuse every flash attention by themselves
        named = "attn_implementation" in str(error)
        return Outcome("refused" if named else "fails", f"ValueError: {error}")
    except DifferenceError as error:
        if names := agreed(eager, given, "eager", torch.float64):
            return Outcome("served", f"in float64: {names}")
        as_sdpa = agreed(eager, given, "sdpa", torch.float32)
        return Outcome("as sdpa" if as_sdpa else "differs", str(error))
    except Exception as error:
        return Outcome("fails", f"{type(error).__name__}: {error}")
    finally:
        logger.removeHandler(handler)
        integration.register()
    if said:
        return Outcome("own" if not calls else "in part", "; ".join(sorted(set(said))))
    return Outcome("served" if calls else "no attention", " ".join(passed))


_ALONE = threading.Lock()


def sweep(kinds: list[Any]) -> Iterator[str]:
    """The lines of the table, from a process that is replaced when it dies, and now and then."""
    while kinds:
        some = kinds[:TOGETHER]
        with _ALONE:  # another's process would keep this one's end open
            pipe, end = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=_send, args=(some, end))
            process.start()
            end.close()
        for kind in some:
            try:
                outcome = pipe.recv()
            except EOFError:
                process.join()
                outcome = Outcome("not run", f"its process ended with {process.exitcode}")
            yield line(kind.__name__, outcome)
            kinds = kinds[1:]
            if process.exitcode:
                break
        process.join()


def _send(kinds: list[Any], end: Any) -> None:
    """Judge the classes one after the other, each for so many seconds at most."""

    def stop(*_: Any) -> None:
        raise TimeIsUpError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    torch.set_num_threads(1)
    for kind in kinds:
        signal.alarm(SECONDS)
        try:
            outcome = judge(kind)
        except TimeIsUpError as error:
            outcome = Outcome("not run", str(error))
        signal.alarm(0)
        end.send(outcome)


def line(name: str, outcome: Outcome) -> str:
    """A line of the table: no numbers or places that change from run to run."""
    why = re.sub(r"\s+", " ", outcome.why)
    why = re.sub(r"0x[0-9a-f]+", "0x…", why)
    return f"{name:<62} {outcome.word:<13} {why[:160]}".rstrip()


def word(text: str) -> str:
    """The outcome's word of a line."""
    return text[63:76].strip()


def main() -> int:
    """Run the sweep; 1 if a class differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a class's name, or a folder")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    logging.getLogger("flashvar").propagate = False
    integration.register()
    kinds = list(classes(options.only))
    found: list[str] = []

    def part(first: int) -> None:
        for text in sweep(kinds[first :: options.jobs]):
            print(text, flush=True)
            found.append(text)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(part, range(options.jobs)))
    counts: dict[str, int] = {}
    for text in found:
        counts[word(text)] = counts.get(word(text), 0) + 1
    head = (
        f"transformers {transformers.__version__}, flashvar against eager attention, float32, CPU"
    )
    summary = ", ".join(f"{word} {count}" for word, count in sorted(counts.items()))
    print(summary, file=sys.stderr)
    if not options.only:
        TABLE.write_text("\n".join((head, summary, "", *sorted(found), "")), encoding="utf-8")
    return int(any(word in counts for word in ("differs", "fails")))


if __name__ == "__main__":
    sys.exit(main())
