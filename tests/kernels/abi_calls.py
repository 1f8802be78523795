"""Calls of the C functions on the host, with fake kernels: what they check before a kernel runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import host_program

# The kernels of the tables count their launches.
_TABLES = """
struct Fake{Op} {{
  template <class Problem>
  static uint64_t workspace(const Problem&) {{ return 512; }}
  template <class Problem>
  static cudaError_t launch(const Problem&, int, cudaStream_t) {{
    ++launches;
    return cudaSuccess;
  }}
  template <class Problem>
  static void explain(const Problem&, Text& text) {{ text.print("said"); }}
}};
constexpr {Op}Kernel k{Op}Fake{{0, {dims}
  {{&Fake{Op}::workspace, &Fake{Op}::launch, &Fake{Op}::explain}}}};
constexpr const {Op}Kernel* k{Op}Kernels[] = {{&k{Op}Fake, nullptr}};
"""
_DIMS = {  # of the fake kernels: head dims of their rows in the table
    "AttentionFwd": "64, 64,",
    "AttentionBwd": "64, 64,",
    "MergeStatesFwd": "",
    "MergeStatesBwd": "",
    "GatedDeltaRuleFwd": "64,",
    "GatedDeltaRuleBwd": "64,",
    "GatedDeltaRuleUpdate": "64,",
    "CausalConv1dFwd": "",
    "CausalConv1dBwd": "",
    "CausalConv1dUpdate": "",
}

NAMES = (
    *("attention_fwd", "attention_bwd", "merge_states_fwd", "merge_states_bwd"),
    *("gated_delta_rule_fwd", "gated_delta_rule_bwd", "gated_delta_rule_update"),
    *("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update"),
)

_CALLS = """
#include <cstdio>
#include <string>
#include "cuda_runtime_api.h"
namespace flashvar { int launches = 0; }
#include "abi/attention_fwd.cc"
#include "abi/attention_bwd.cc"
#include "abi/merge_states_fwd.cc"
#include "abi/merge_states_bwd.cc"
#include "abi/gated_delta_rule_fwd.cc"
#include "abi/gated_delta_rule_bwd.cc"
#include "abi/gated_delta_rule_update.cc"
#include "abi/causal_conv1d_fwd.cc"
#include "abi/causal_conv1d_bwd.cc"
#include "abi/causal_conv1d_update.cc"
#include "abi/error.cc"

flashvar::DeviceGuard::DeviceGuard(int) : status_(FLASHVAR_OK) {}
flashvar::DeviceGuard::~DeviceGuard() {}

alignas(256) char memory[1024];
const void* parts[2] = {memory, memory};
char text[64];
uint64_t bytes;

template <class Params>
void begin(Params& p) {
  p = {};
  p.call = {sizeof(Params), FLASHVAR_ABI_VERSION, 0, 0, nullptr, memory, 512};
}

flashvar_tensor tensor() { return {memory, 64, 64, 64}; }

flashvar_attention_problem attention() {
  flashvar_attention_problem p{};
  p.batch = p.seqlen_q = p.seqlen_k = p.heads_q = p.heads_kv = 1;
  p.head_dim = 64;
  p.scale = 1.f;
  return p;
}

void fill(flashvar_attention_fwd_params& p) {
  begin(p);
  p.q = p.k = p.v = p.out = tensor();
  p.problem = attention();
}

void fill(flashvar_attention_bwd_params& p) {
  begin(p);
  p.q = p.k = p.v = p.out = p.grad_out = p.grad_q = p.grad_k = p.grad_v = tensor();
  p.lse = reinterpret_cast<float*>(memory);
  p.problem = attention();
}

flashvar_merge_states_problem merge() {
  flashvar_merge_states_problem p{};
  p.batch = p.seqlen = p.heads = 1;
  p.head_dim = 64;
  p.parts = 2;
  p.outs = p.lses = tensor();
  p.out_parts = p.lse_parts = parts;
  return p;
}

void fill(flashvar_merge_states_fwd_params& p) {
  begin(p);
  p.out = tensor();
  p.problem = merge();
}

void fill(flashvar_merge_states_bwd_params& p) {
  begin(p);
  p.grad_out = p.grad_outs = tensor();
  p.grad_lses = reinterpret_cast<float*>(memory);
  p.problem = merge();
}

flashvar_gated_delta_rule_problem rule() {
  flashvar_gated_delta_rule_problem p{};
  p.sequences = p.seqlen = p.heads_qk = p.heads = 1;
  p.head_dim = p.head_dim_v = 64;
  p.scale = 1.f;
  p.q = p.k = p.v = tensor();
  p.beta.data = memory;
  return p;
}

template <class Params>
void fill_rule(Params& p) {
  begin(p);
  p.out = tensor();
  p.problem = rule();
}
void fill(flashvar_gated_delta_rule_fwd_params& p) { fill_rule(p); }
void fill(flashvar_gated_delta_rule_update_params& p) { fill_rule(p); }

void fill(flashvar_gated_delta_rule_bwd_params& p) {
  begin(p);
  p.grad_out = p.grad_q = p.grad_k = p.grad_v = tensor();
  p.grad_beta.data = memory;
  p.problem = rule();
}

flashvar_strided strided() { return {memory, 8, 8, 1, 0, 0}; }

flashvar_causal_conv1d_problem convolution() {
  flashvar_causal_conv1d_problem p{};
  p.batch = p.seqlen = p.sequences = 1;
  p.dim = 8;
  p.width = 4;
  p.columns = 3;
  p.x = p.weight = p.bias = p.state = strided();
  return p;
}

void fill(flashvar_causal_conv1d_fwd_params& p) {
  begin(p);
  p.y = p.final_state = strided();
  p.problem = convolution();
}

void fill(flashvar_causal_conv1d_bwd_params& p) {
  begin(p);
  p.grad_x = p.grad_weight = p.grad_y = strided();
  p.problem = convolution();
}

void fill(flashvar_causal_conv1d_update_params& p) {
  begin(p);
  p.y = strided();
  p.problem = convolution();
}

void say(const std::string& name, int status) {
  std::printf("%s\\t%d\\t%d\\t%s\\n", name.c_str(), status, flashvar::launches,
              status == FLASHVAR_OK ? "" : flashvar_last_error());
  flashvar::launches = 0;
}

template <class Params, class Change>
void call(const char* name, flashvar_status (*function)(const Params*), Change change) {
  Params p;
  fill(p);
  change(p);
  say(name, function(&p));
}
"""


def answers(program: str, folder: Path) -> dict[str, list[str]]:
    """Case -> status, number of launches, error: what `program` says of its calls."""
    headers = {
        f"{name}_kernels.inc": _TABLES.format(Op=op, dims=dims)
        for name, (op, dims) in zip(NAMES, _DIMS.items(), strict=True)
    }
    code, printed = host_program.run(_CALLS + program, folder, headers)
    assert code == 0
    return {name: rest for name, *rest in (line.split("\t") for line in printed.splitlines())}


def check(case: str, said: str | None, answers: Mapping[str, list[str]]) -> None:
    """A call gives the error that starts with `said`; "": it launches, None: it need not."""
    status, launches, error = answers[case]
    if said:
        assert (status, launches) == ("1", "0")
        assert error.startswith(said)
    else:
        assert (status, error) == ("0", "")
        assert launches == ("0" if said is None else "1")
