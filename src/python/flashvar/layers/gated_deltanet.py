"""The layer of gated delta networks on flashvar's kernels."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.layers.joined import are_one_convolution, joined, project, project_each
from flashvar.layers.norms import FusedRMSNormGated, RMSNorm
from flashvar.layers.padding import pack, packing_of, unpack
from flashvar.layers.short_convolution import ShortConvolution, refuse_context_parallel
from flashvar.layers.state_cache import check_cache
from flashvar.ops.arguments import count, is_number, size
from flashvar.ops.causal_conv1d.api import causal_conv1d
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.gated_delta_rule.api import gated_delta_rule


class GatedDeltaNet(nn.Module):  # type: ignore[misc]
    """Linear attention by the gated delta rule, with short convolutions and an output gate.

    The kernels compute the gate of the state, the sigmoid of beta and the norms of q and k. The
    parameters have the names, shapes and initial values of flash-linear-attention's layer.

    Args:
        hidden_size: The size of the input and the output.
        expand_v: The head dim of v, divided by that of q and k.
        head_dim: The head dim of q and k.
        num_heads: The number of heads of q and k.
        num_v_heads: The number of heads of v, a multiple of num_heads; num_heads by default.
        mode: Accepts "chunk" or "fused_recurrent"; flashvar chooses by the shape of a call.
        use_gate: Gate the output.
        use_short_conv: Convolve q, k and v; without it they only pass the activation.
        allow_neg_eigval: Let beta range to 2 instead of 1.
        conv_size: The width of the convolutions, at least 2; kernels have 2 to 4.
        conv_bias: Give the convolutions a bias.
        layer_idx: The index of the layer's states in a cache.
        norm_eps: The epsilon of the output's norm.
        output_gate_activation: "swish", "silu" or "sigmoid".
        **kwargs: Not used.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        hidden_size, head_dim = size("hidden_size", hidden_size), size("head_dim", head_dim)
        self.mode = mode
        self.allow_neg_eigval = allow_neg_eigval
        self.hidden_size = hidden_size
        if not is_number(expand_v) or not 0 < expand_v < math.inf:
            raise InvalidInputError(
                f"expand_v must be a positive number, found {expand_v!r}: leave it out for 2"
            )
        self.expand_v = expand_v
        self.use_gate = use_gate
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size = size("conv_size", conv_size)
        self.conv_bias = conv_bias
        self.head_dim = head_dim
        self.num_heads = size("num_heads", num_heads)
        self.num_v_heads = (
            self.num_heads if num_v_heads is None else size("num_v_heads", num_v_heads)
        )
        self.head_k_dim = head_dim
        self.head_v_dim = int(head_dim * expand_v)
        self.key_dim = self.num_heads * self.head_k_dim
        self.value_dim = self.num_v_heads * self.head_v_dim
        self.layer_idx = None if layer_idx is None else count("layer_idx", layer_idx)
        self._check()
        # In this order: it decides which random numbers each parameter gets.
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log, self.dt_bias = _gate_parameters(self.num_v_heads)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, conv_bias)
        self.o_norm: RMSNorm
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
            self.o_norm = FusedRMSNormGated(
                self.head_v_dim, eps=norm_eps, activation=output_gate_activation
            )
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _check(self) -> None:
        if self.mode not in ("chunk", "fused_recurrent"):
            raise InvalidInputError(
                f"mode must be 'chunk' or 'fused_recurrent', found {self.mode!r}: leave it out"
            )
        if not math.isclose(self.head_dim * self.expand_v, self.head_v_dim, rel_tol=1e-5):
            raise InvalidInputError(
                f"head_dim times expand_v must be an integer, found {self.head_dim} times "
                f"{self.expand_v}: choose another expand_v"
            )
        if self.num_v_heads % self.num_heads:
            raise InvalidInputError(
                f"num_v_heads must be a multiple of num_heads, found {self.num_v_heads} and "
                f"{self.num_heads}: leave it out for num_heads"
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cp_context: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Any]:
        """Return the output, None in place of attention weights, and the cache.

        Args:
            hidden_states: [batch, seqlen, hidden_size].
            attention_mask: [batch, seqlen or more], 0 for padding, whose output is 0. The last
                seqlen columns are those of hidden_states. Not used with cu_seqlens.
            past_key_values: A `StateCache` or flash-linear-attention's Cache, whose states precede
                hidden_states.
            use_cache: Store the states after the call in the cache; without it the cache stays as
                it is.
            output_attentions: Not used: there are none.
            cu_seqlens: The offsets of sequences packed into a batch of 1.
            cp_context: Refused: a sequence may not be split over processes.
            **kwargs: Not used. Other names of packed sequences are refused without cu_seqlens.
        """
        refuse_context_parallel(cp_context)
        if cu_seqlens is None:
            _refuse_other_packing(kwargs)
        if hidden_states.dim() != 3:
            raise ShapeError(
                "hidden_states must be [batch, seqlen, hidden_size], found "
                f"{tuple(hidden_states.shape)}: unsqueeze the batch"
            )
        batch, seqlen, _ = hidden_states.shape
        last = self._states(past_key_values)
        packing = None
        if attention_mask is not None and cu_seqlens is None:
            packing = packing_of(attention_mask, batch, seqlen)
            hidden_states, cu_seqlens = pack(hidden_states, packing), packing.cu_seqlens
        use_cache = bool(use_cache)
        q, k, v, conv_state = self._qkv(
            hidden_states, last.get("conv_state"), use_cache, cu_seqlens
        )
        out, state = gated_delta_rule(
            _by_heads("q", q, self.num_heads, self.head_k_dim),
            _by_heads("k", k, self.num_heads, self.head_k_dim),
            _by_heads("v", v, self.num_v_heads, self.head_v_dim),
            *project_each(hidden_states, (self.a_proj, self.b_proj)),
            initial_state=last.get("recurrent_state"),
            return_final_state=use_cache,
            state_layout="vk",
            cu_seqlens=cu_seqlens,
            qk_l2norm=True,
            beta_sigmoid=True,
            allow_neg_eigval=self.allow_neg_eigval,
            A_log=_beside(q, self.A_log),
            dt_bias=_beside(q, self.dt_bias),
        )
        if past_key_values is not None and use_cache:
            past_key_values.update(
                layer_idx=self.layer_idx,
                recurrent_state=state,
                conv_state=conv_state,
                offset=seqlen,
            )
        if self.use_gate:
            gate = self.g_proj(hidden_states).unflatten(-1, (self.num_v_heads, self.head_v_dim))
            out = self.o_norm(out, gate)
        else:
            out = self.o_norm(out)
        out = self.o_proj(out.flatten(-2))
        return out if packing is None else unpack(out, packing), None, past_key_values

    def _states(self, cache: Any) -> dict[str, Any]:
        """The layer's states in a cache."""
        if cache is None:
            return {}
        if self.layer_idx is None:
            raise InvalidInputError(
                "layer_idx must be given with past_key_values, found None: pass the index of the "
                "layer to its constructor"
            )
        if not is_compiling():
            check_cache(cache)
        found = cache[self.layer_idx] if len(cache) > self.layer_idx else None
        return {} if found is None else cast("dict[str, Any]", found)

    def _qkv(
        self,
        x: torch.Tensor,
        states: Any,
        use_cache: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """q, k and v, and the states of their convolutions."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if not self.use_short_conv:
            q, k, v = (functional.silu(layer(x)) for layer in projections)
            return q, k, v, None
        layers = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        if states is not None or use_cache or not are_one_convolution(layers):
            projected = [layer(x) for layer in projections]
            if states is not None and not use_cache:  # one token would be written into them
                states = [state.clone() for state in states]
            found = [
                layer(one, cache=state, output_final_state=use_cache, cu_seqlens=cu_seqlens)
                for layer, one, state in zip(layers, projected, states or (None,) * 3, strict=True)
            ]
            (q, k, v), after = zip(*found, strict=True)
            return q, k, v, after if use_cache else None
        biases = [layer.bias for layer in layers]
        y = causal_conv1d(
            project(x, projections),
            joined([layer.weight.squeeze(1) for layer in layers]),
            None if biases[0] is None else joined(biases),
            activation="silu",
            cu_seqlens=cu_seqlens,
        )
        assert isinstance(y, torch.Tensor)
        q, k, v = y.split((self.key_dim, self.key_dim, self.value_dim), -1)
        return q, k, v, None


def _refuse_other_packing(given: dict[str, Any]) -> None:
    """Refuse packed sequences that would be computed as one."""
    for name in ("seq_idx", "cu_seq_lens_q"):
        if given.get(name) is not None:
            raise InvalidInputError(
                f"packed sequences must come as cu_seqlens, found {name} alone: pass their offsets "
                "as cu_seqlens"
            )


def _by_heads(name: str, x: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    if x.shape[-1] != heads * head_dim:
        raise ShapeError(
            f"{name} must have {heads} heads of {head_dim} channels, found {tuple(x.shape)}: where "
            "ranks have some heads each, keep projections DTensors with use_local_output=False"
        )
    return x.unflatten(-1, (heads, head_dim))


def _beside(q: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter in a dtype that the kernels take with q, whose dtype autocast may have chosen."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return parameter if parameter.dtype in (q.dtype, wide) else parameter.to(wide)


def _gate_parameters(heads: int) -> tuple[nn.Parameter, nn.Parameter]:
    """A_log of A in (0, 16), and dt_bias of a softplus in (0.001, 0.1); neither decays."""
    dtype = torch.promote_types(torch.float32, torch.get_default_dtype())
    a_log = nn.Parameter(torch.empty(heads, dtype=dtype).uniform_(0, 16).log())
    low, high = math.log(0.001), math.log(0.1)
    dt = (torch.rand(heads) * (high - low) + low).exp().clamp(min=1e-4)
    dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
    for parameter in (a_log, dt_bias):
        parameter._no_weight_decay = True
    return a_log, dt_bias
