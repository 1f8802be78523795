"""Models of transformers with linear attention, on their own torch path and on flashvar.

    python linear_transformers.py qwen3_next

prints one JSON object: check -> "" or what was wrong. transformers looks its functions up when a
module of a model is imported, so each model is imported twice: before the stand-ins are provided,
and after.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from small_models import CACHE

LENGTHS = (7, 1, 13, 3)
TOTAL = sum(LENGTHS)
VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 128,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 2,
}
# Module -> class of the model, class of its configuration, what the configuration has besides.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", EXPERTS),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", EXPERTS),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {"linear_allow_neg_eigval": True}),
}

CHECKS = (
    "training",
    "packed by offsets",
    "packed with a cache",
    "packed with seq_idx",
    "generation",
    "generation with padding",
    "a prompt in two pieces",
    "decoding that autograd records",
)


def imported(name: str) -> Any:
    """The module of a model, anew."""
    full = f"transformers.models.{name}.modeling_{name}"
    sys.modules.pop(full, None)
    return importlib.import_module(full)


def made(module: Any, model_name: str) -> Any:
    model, config, others = MODELS[model_name]
    torch.manual_seed(1)
    options = {**SIZES, **others}
    if model_name == "olmo_hybrid":
        options["linear_num_value_heads"] = options["linear_num_key_heads"]
    found = getattr(module, model)(getattr(module, config)(**options)).float()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, parameter in found.named_parameters():
            if name.endswith("A_log"):  # gates that do not drown their gradients in rounding
                parameter.uniform_(-3, 0, generator=generator)
    return found


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


def trained(model: Any, call: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
    """The logits, and the gradients of all parameters that have one."""
    model.train()
    model.zero_grad(set_to_none=True)
    logits = call(model)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4))
    (logits * weights).sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def alone(model: Any) -> torch.Tensor:
    parts = ids(1, TOTAL).split(LENGTHS, 1)
    return torch.cat([model(part, use_cache=False).logits for part in parts], 1)


def packed(*, cache: bool, seq_idx: bool) -> Callable[[Any], torch.Tensor]:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    options = {
        "position_ids": torch.cat([torch.arange(one) for one in LENGTHS])[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "use_cache": cache,
    }
    if seq_idx:
        numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        options["seq_idx"] = numbers[None].int()
    return lambda model: model(ids(1, TOTAL), **options).logits


def generated(model: Any, mask: bool) -> torch.Tensor:
    """Tokens, two sequences at a time, the second with padding on the left."""
    tokens = ids(2, 9)
    kept = torch.ones_like(tokens)
    if mask:
        kept[1, :4], tokens[1, :4] = 0, 0
    model.eval()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    found: torch.Tensor = model.generate(tokens, attention_mask=kept, **options)
    return found


def checks(name: str) -> dict[str, Callable[[], None]]:
    """Check -> what raises where flashvar differs."""
    import flashvar.compat.causal_conv1d
    import flashvar.compat.fla
    import flashvar.integrations.transformers

    theirs = made(imported(name), name)
    flashvar.integrations.transformers.register()
    flashvar.compat.fla.provide()
    flashvar.compat.causal_conv1d.provide()
    ours = made(imported(name), name)
    assert all(map(torch.equal, theirs.parameters(), ours.parameters()))

    def alike(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        assert len(found) == len(wanted) > 20
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == other.shape
            error = float((one - other).norm() / other.norm().clamp(min=1e-30))
            # Gradients of a gate's parameters are sums of both signs over all tokens.
            limit = 1e-4 if one.dim() > 1 else 1e-3
            assert error < limit, f"relative error {error} of {tuple(one.shape)}"

    def whole(model: Any) -> torch.Tensor:
        logits: torch.Tensor = model(ids(2, TOTAL), use_cache=False).logits
        return logits

    def packs(**options: bool) -> Callable[[], None]:
        def check() -> None:
            ours.set_attn_implementation("flashvar")
            found = trained(ours, packed(**options))
            ours.set_attn_implementation("sdpa")
            alike(found, trained(theirs, alone))

        return check

    def generates(mask: bool) -> Callable[[], None]:
        return lambda: torch.testing.assert_close(generated(ours, mask), generated(theirs, mask))

    def continues() -> None:
        """A prompt in two pieces, with a cache, is the whole prompt."""
        for model in (ours.eval(), theirs.eval()):
            with torch.no_grad():
                first = model(ids(2, 20)[:, :11], use_cache=True)
                rest = model(ids(2, 20)[:, 11:], **{CACHE: first[CACHE]})
                wanted = theirs(ids(2, 20), use_cache=False).logits[:, 11:]
            torch.testing.assert_close(rest.logits, wanted, atol=2e-4, rtol=2e-4)

    def records() -> None:
        """Tokens one by one outside torch.no_grad() are one forward."""
        found = ours.eval()(ids(2, 9)[:, :5], use_cache=True)
        for token in ids(2, 9)[:, 5:].split(1, 1):
            found = ours(token, use_cache=True, **{CACHE: found[CACHE]})
        wanted = theirs.eval()(ids(2, 9), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(found.logits, wanted, atol=2e-4, rtol=2e-4)

    runs = (
        lambda: alike(trained(ours, whole), trained(theirs, whole)),
        packs(cache=False, seq_idx=False),
        packs(cache=True, seq_idx=False),
        packs(cache=False, seq_idx=True),
        generates(mask=False),
        generates(mask=True),
        continues,
        records,
    )
    return dict(zip(CHECKS, runs, strict=True))


def main() -> None:
    warnings.simplefilter("ignore")
    found = {}
    for check, run in checks(sys.argv[1]).items():
        try:
            run()
            found[check] = ""
        except Exception as error:
            found[check] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
