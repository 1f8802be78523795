"""What the C functions check of a call before a kernel sees it, compiled for the host."""

from __future__ import annotations

import abi_calls
import host_program
import pytest

pytestmark = host_program.needs_compiler

PROGRAM = """
template <class Params>
void common(const std::string& op, flashvar_status (*launch)(const Params*),
            flashvar_status (*workspace)(const Params*, uint64_t*),
            flashvar_status (*explain)(const Params*, char*, uint64_t)) {
  Params p;
  fill(p);
  say(op, launch(&p));
  say(op + " workspace", workspace(&p, &bytes));
  say(op + " explain", explain(&p, text, sizeof(text)));
  say(op + " nowhere to say it", explain(&p, nullptr, 8));
  say(op + " nothing to say", explain(&p, nullptr, 0));
  say(op + " no size", workspace(&p, nullptr));
  p.call.workspace = nullptr;
  say(op + " no workspace", launch(&p));
  fill(p);
  p.call.reserved = 7;
  say(op + " reserved", launch(&p));
  say(op + " workspace, reserved", workspace(&p, &bytes));
  say(op + " explain, reserved", explain(&p, text, sizeof(text)));
  say(op + " no parameters", launch(nullptr));
}

int main() {
  using Fwd = flashvar_attention_fwd_params;
  using Bwd = flashvar_attention_bwd_params;
  using MergeFwd = flashvar_merge_states_fwd_params;
  using MergeBwd = flashvar_merge_states_bwd_params;
  using ConvFwd = flashvar_causal_conv1d_fwd_params;
  using ConvBwd = flashvar_causal_conv1d_bwd_params;
  using ConvUpdate = flashvar_causal_conv1d_update_params;
#define COMMON(op) common(#op, flashvar_##op, flashvar_##op##_workspace, flashvar_##op##_explain)
  COMMON(attention_fwd);
  COMMON(attention_bwd);
  COMMON(merge_states_fwd);
  COMMON(merge_states_bwd);
  COMMON(gated_delta_rule_fwd);
  COMMON(gated_delta_rule_bwd);
  COMMON(gated_delta_rule_update);
  COMMON(causal_conv1d_fwd);
  COMMON(causal_conv1d_bwd);
  COMMON(causal_conv1d_update);
  call("q", flashvar_attention_fwd, [](Fwd& p) { p.q.data = nullptr; });
  call("v", flashvar_attention_fwd, [](Fwd& p) { p.v.data = nullptr; });
  call("no keys", flashvar_attention_fwd, [](Fwd& p) {
    p.k.data = p.v.data = nullptr;
    p.problem.seqlen_k = 0;
  });
  call("delta of a forward", flashvar_attention_fwd, [](Fwd& p) {
    p.problem.delta = reinterpret_cast<float*>(memory);
  });
  call("sinks", flashvar_attention_fwd, [](Fwd& p) {
    p.problem.sinks = memory;
    p.problem.sinks_dtype = FLASHVAR_FP32;
  });
  call("dtype of sinks", flashvar_attention_fwd, [](Fwd& p) { p.problem.sinks_dtype = 3; });
  call("a caller that knows no sinks", flashvar_attention_fwd, [](Fwd& p) {
    p.problem.sinks_dtype = 3;
    p.call.struct_size = 344;
  });
  call("lse", flashvar_attention_bwd, [](Bwd& p) { p.lse = nullptr; });
  call("grad_v", flashvar_attention_bwd, [](Bwd& p) { p.grad_v.data = nullptr; });
  call("no queries", flashvar_attention_bwd, [](Bwd& p) {
    p.q.data = p.out.data = p.grad_out.data = p.grad_q.data = nullptr;
    p.lse = nullptr;
    p.problem.seqlen_q = 0;
  });
  call("out", flashvar_merge_states_fwd, [](MergeFwd& p) { p.out.data = nullptr; });
  call("no elements", flashvar_merge_states_fwd, [](MergeFwd& p) {
    p.out.data = nullptr;
    p.problem.head_dim = 0;
  });
  call("stacked outs", flashvar_merge_states_fwd, [](MergeFwd& p) {
    p.problem.out_parts = nullptr;
    p.problem.outs.data = nullptr;
  });
  parts[1] = nullptr;
  call("a part", flashvar_merge_states_fwd, [](MergeFwd&) {});
  call("outs that are not read", flashvar_merge_states_bwd, [](MergeBwd& p) {
    p.problem.lse_parts = nullptr;
    p.grad_lses = nullptr;
  });
  call("x", flashvar_causal_conv1d_fwd, [](ConvFwd& p) { p.problem.x.data = nullptr; });
  call("width", flashvar_causal_conv1d_fwd, [](ConvFwd& p) { p.problem.width = 5; });
  call("dtype of y", flashvar_causal_conv1d_fwd, [](ConvFwd& p) { p.y.dtype = 2; });
  call("dtype of residual", flashvar_causal_conv1d_fwd, [](ConvFwd& p) {
    p.residual = strided();
    p.residual.dtype = 3;
  });
  call("final state", flashvar_causal_conv1d_fwd, [](ConvFwd& p) {
    p.final_columns = 3;
    p.final_state.data = nullptr;
  });
  call("no rows of x", flashvar_causal_conv1d_fwd, [](ConvFwd& p) {
    p.problem.seqlen = 0;
    p.problem.x.data = p.y.data = nullptr;
  });
  call("final state alone", flashvar_causal_conv1d_fwd, [](ConvFwd& p) {
    p.problem.seqlen = 0;
    p.final_columns = 3;
  });
  call("sequences", flashvar_causal_conv1d_bwd, [](ConvBwd& p) { p.problem.sequences = 2; });
  call("packed batch", flashvar_causal_conv1d_bwd, [](ConvBwd& p) {
    p.problem.cu_seqlens = memory;
    p.problem.batch = 2;
  });
  call("gradients of no tokens", flashvar_causal_conv1d_bwd, [](ConvBwd& p) {
    p.problem.seqlen = 0;
    p.problem.x.data = p.grad_x.data = p.grad_y.data = nullptr;
  });
  call("columns", flashvar_causal_conv1d_update, [](ConvUpdate& p) { p.problem.columns = 2; });
  call("packed update", flashvar_causal_conv1d_update, [](ConvUpdate& p) {
    p.problem.cu_seqlens = memory;
  });
  call("pool", flashvar_causal_conv1d_update, [](ConvUpdate& p) {
    p.problem.state.data = nullptr;
  });
  call("no gradient", flashvar_merge_states_bwd, [](MergeBwd& p) {
    p.grad_outs.data = nullptr;
    p.grad_lses = nullptr;
  });
  using Update = flashvar_gated_delta_rule_update_params;
  auto update = [](const char* name, auto change) {
    call(name, flashvar_gated_delta_rule_update, change);
  };
  update("beta", [](Update& p) { p.problem.beta.data = nullptr; });
  update("no tokens", [](Update& p) {
    p.problem.q.data = p.problem.k.data = p.problem.v.data = p.out.data = nullptr;
    p.problem.seqlen = 0;
  });
  update("no sequences", [](Update& p) { p.problem.sequences = 0; });
  update("any head dims", [](Update& p) {
    p.problem.head_dim = 33;
    p.problem.head_dim_v = 1000001;
  });
  update("no head dim", [](Update& p) { p.problem.head_dim = 0; });
  update("heads", [](Update& p) { p.problem.heads_qk = 2; });
  update("states of fp32", [](Update& p) { p.state_dtype = FLASHVAR_FP32; });
  update("states of another dtype", [](Update& p) { p.state_dtype = FLASHVAR_FP16; });
  update("a pool", [](Update& p) {
    p.state_indices = memory;
    p.index_bytes = 8;
    p.states = 3;
  });
  update("indices", [](Update& p) {
    p.state_indices = memory;
    p.index_bytes = 2;
  });
  update("bytes of no index", [](Update& p) { p.index_bytes = 4; });
  update("states", [](Update& p) { p.states = -1; });
}
"""

# Case -> what the error names; "" where the call launches, None where it succeeds without a launch.
_OF_EVERY_OP: dict[str, str | None] = {
    "": "",
    " workspace": None,
    " explain": None,
    " nothing to say": None,
    " nowhere to say it": "text must point to 8 bytes, found NULL",
    " no size": "size must point to",
    " no workspace": "workspace must have 512 bytes",
    " reserved": "flashvar_call.reserved must be 0, found 7",
    " workspace, reserved": "flashvar_call.reserved must be 0, found 7",
    " explain, reserved": "flashvar_call.reserved must be 0, found 7",
    " no parameters": "params must point to the op's parameters, found NULL",
}
EXPECTED: dict[str, str | None] = {
    **{name + case: said for name in abi_calls.NAMES for case, said in _OF_EVERY_OP.items()},
    "q": "attention_fwd needs the address of q.data, found NULL",
    "v": "attention_fwd needs the address of v.data, found NULL",
    "no keys": "",
    "delta of a forward": "delta is written by the backward, found its address in a forward",
    "sinks": "",
    "dtype of sinks": "sinks_dtype must be 0, 1 or 2, found 3",
    "a caller that knows no sinks": "",
    "lse": "attention_bwd needs the address of lse, found NULL",
    "grad_v": "attention_bwd needs the address of grad_v.data, found NULL",
    "no queries": "",
    "out": "merge_states_fwd needs the address of out.data, found NULL",
    "no elements": "",
    "stacked outs": "merge_states_fwd needs the address of outs.data, found NULL",
    "a part": "merge_states_fwd needs the address of every part in out_parts, found NULL",
    "outs that are not read": "",
    "no gradient": None,
    "beta": "gated_delta_rule_update needs the address of beta.data, found NULL",
    "no tokens": "",
    "no sequences": None,
    "any head dims": "",
    "no head dim": "head dims must be at least 1 and multiples of 1, found 0 and 64",
    "heads": "heads must be a multiple of heads_qk, found 1 and 2",
    "states of fp32": "",
    "states of another dtype": "state_dtype must be 2 or the problem's, 0, found 1",
    "a pool": "",
    "indices": "index_bytes must be 4 or 8 with state_indices and 0 without, found 2",
    "bytes of no index": "index_bytes must be 4 or 8 with state_indices and 0 without, found 4",
    "states": "states must be at least 0, found -1",
    "x": "causal_conv1d_fwd needs the address of x.data, found NULL",
    "width": "width must be 2 to 4, found 5",
    "dtype of y": "y must have the problem's dtype, 0, found 2",
    "dtype of residual": "residual.dtype must be 0 to 2, found 3",
    "final state": "causal_conv1d_fwd needs the address of final_state.data, found NULL",
    "no rows of x": None,
    "final state alone": "",
    "sequences": "sequences must be the batch without cu_seqlens, found 2 and 1",
    "packed batch": "batch must be 1 beside cu_seqlens, found 2",
    "gradients of no tokens": "",
    "columns": "a state must have width - 1 columns or more, found 2 of width 4",
    "packed update": "cu_seqlens must be NULL in an update",
    "pool": "causal_conv1d_update needs the address of state.data, found NULL",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return abi_calls.answers(PROGRAM, tmp_path_factory.mktemp("abi"))


def test_every_case_is_answered(answers: dict[str, list[str]]) -> None:
    assert set(answers) == set(EXPECTED)


@pytest.mark.parametrize(("case", "said"), EXPECTED.items())
def test_a_call(case: str, said: str | None, answers: dict[str, list[str]]) -> None:
    abi_calls.check(case, said, answers)
