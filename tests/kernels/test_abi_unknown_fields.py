"""The C functions refuse flags and fields that they do not know, compiled for the host."""

from __future__ import annotations

import abi_calls
import host_program
import pytest

pytestmark = host_program.needs_compiler

PROGRAM = """
// Bits that no header defines, of an op that has flags.
template <class Params>
void unknown_flags(const std::string& op, flashvar_status (*function)(const Params*)) {
  Params p;
  fill(p);
  p.problem.flags = 1u << 31;
  say(op + " unknown flags", function(&p));
}

// Reserved fields of the problem of a gated delta rule.
template <class Params>
void reserved_of_rule(const std::string& op, flashvar_status (*function)(const Params*)) {
  Params p;
  fill(p);
  p.problem.reserved = 1;
  say(op + " problem.reserved", function(&p));
  fill(p);
  p.problem.dt_bias.reserved = 1;
  say(op + " dt_bias.reserved", function(&p));
  fill(p);
  p.problem.dt_bias.data = memory;
  say(op + " dt_bias without a_log", function(&p));
  p.problem.a_log.data = memory;
  say(op + " dt_bias with a_log", function(&p));
}

// Reserved fields of the tensors of a convolution.
template <class Params>
void reserved_of_tensors(const std::string& op, flashvar_status (*function)(const Params*),
                         flashvar_strided Params::*result) {
  Params p;
  fill(p);
  p.problem.x.reserved = 1;
  say(op + " x.reserved", function(&p));
  fill(p);
  p.problem.bias = {};
  p.problem.bias.reserved = 1;
  say(op + " reserved of no bias", function(&p));
  fill(p);
  (p.*result).reserved = 1;
  say(op + " reserved of a result", function(&p));
}

// Parameters of a caller that knows one more field.
struct Newer {
  flashvar_merge_states_fwd_params known;
  uint64_t field;
};

void newer_caller(const char* name, uint64_t field) {
  Newer newer;
  fill(newer.known);
  newer.known.call.struct_size = sizeof(newer);
  newer.field = field;
  say(name, flashvar_merge_states_fwd(&newer.known));
}

int main() {
  using ConvFwd = flashvar_causal_conv1d_fwd_params;
  using ConvBwd = flashvar_causal_conv1d_bwd_params;
  using ConvUpdate = flashvar_causal_conv1d_update_params;
#define UNKNOWN_FLAGS(op) unknown_flags(#op, flashvar_##op)
  UNKNOWN_FLAGS(attention_fwd);
  UNKNOWN_FLAGS(attention_bwd);
  UNKNOWN_FLAGS(gated_delta_rule_fwd);
  UNKNOWN_FLAGS(gated_delta_rule_bwd);
  UNKNOWN_FLAGS(gated_delta_rule_update);
  UNKNOWN_FLAGS(causal_conv1d_fwd);
  UNKNOWN_FLAGS(causal_conv1d_bwd);
  UNKNOWN_FLAGS(causal_conv1d_update);
#define RESERVED_OF_RULE(op) reserved_of_rule(#op, flashvar_##op)
  RESERVED_OF_RULE(gated_delta_rule_fwd);
  RESERVED_OF_RULE(gated_delta_rule_bwd);
  RESERVED_OF_RULE(gated_delta_rule_update);
  newer_caller("a field of a newer caller", 5);
  newer_caller("a field that a newer caller leaves 0", 0);
  call("end of the problem", flashvar_attention_bwd,
       [](flashvar_attention_bwd_params& p) { p.problem.reserved = 1; });
  call("grad_g.reserved", flashvar_gated_delta_rule_bwd,
       [](flashvar_gated_delta_rule_bwd_params& p) { p.grad_g.reserved = 1; });
  reserved_of_tensors("causal_conv1d_fwd", flashvar_causal_conv1d_fwd, &ConvFwd::y);
  reserved_of_tensors("causal_conv1d_bwd", flashvar_causal_conv1d_bwd, &ConvBwd::grad_bias);
  reserved_of_tensors("causal_conv1d_update", flashvar_causal_conv1d_update, &ConvUpdate::y);
  call("reserved of a convolution", flashvar_causal_conv1d_fwd,
       [](ConvFwd& p) { p.reserved = 1; });
  call("reserved of its backward", flashvar_causal_conv1d_bwd, [](ConvBwd& p) { p.reserved = 1; });
}
"""

# Case -> what the error names; "" where the call launches.
_OF_GATED_DELTA_RULE: dict[str, str | None] = {
    " problem.reserved": "problem.reserved must be 0, found 1: zero the struct",
    " dt_bias.reserved": "dt_bias.reserved must be 0, found 1: zero the struct",
    " dt_bias without a_log": "dt_bias must be NULL without a_log",
    " dt_bias with a_log": "",
}
_OF_CAUSAL_CONV1D = {
    " x.reserved": "x.reserved must be 0, found 1: zero the struct",
    " reserved of no bias": "bias.reserved must be 0, found 1: zero the struct",
}
EXPECTED: dict[str, str | None] = {
    **{f"{name} unknown flags": "flags must be" for name in abi_calls.NAMES if "merge" not in name},
    **{
        name + case: said
        for name in abi_calls.NAMES
        if name.startswith("gated_delta_rule")
        for case, said in _OF_GATED_DELTA_RULE.items()
    },
    **{
        name + case: said
        for name in abi_calls.NAMES
        if name.startswith("causal_conv1d")
        for case, said in _OF_CAUSAL_CONV1D.items()
    },
    "causal_conv1d_fwd reserved of a result": "y.reserved must be 0, found 1",
    "causal_conv1d_bwd reserved of a result": "grad_bias.reserved must be 0, found 1",
    "causal_conv1d_update reserved of a result": "y.reserved must be 0, found 1",
    "reserved of a convolution": "params.reserved must be 0, found 1",
    "reserved of its backward": "params.reserved must be 0, found 1",
    "grad_g.reserved": "grad_g.reserved must be 0, found 1",
    "a field of a newer caller": "fields that this library is too old to know must be 0, found 5",
    "a field that a newer caller leaves 0": "",
    "end of the problem": "problem.reserved must be 0, found 1: zero the struct",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return abi_calls.answers(PROGRAM, tmp_path_factory.mktemp("abi"))


def test_every_case_is_answered(answers: dict[str, list[str]]) -> None:
    assert set(answers) == set(EXPECTED)


@pytest.mark.parametrize(("case", "said"), EXPECTED.items())
def test_a_call(case: str, said: str | None, answers: dict[str, list[str]]) -> None:
    abi_calls.check(case, said, answers)
