"""The update kernel of gated_delta_rule, run on the host, beside the recurrence in float64."""

from __future__ import annotations

import host_program
import pytest

pytestmark = host_program.needs_compiler

TOKENS = (0, 1, 2, 6)  # of packed sequences; more than a block prepares at once
BATCHES = ("packed", "one token each")
STATES = ("bf16 kv", "bf16 vk", "fp32 kv", "fp32 vk")
# K, V and the distance of a state's rows: a lane's 16 bytes are all of the state, or not.
SHAPES = (
    *((128, 128, 128), (128, 40, 40), (100, 72, 136)),
    *((96, 33, 131), (256, 64, 256), (64, 64, 64)),
)

# Prints for each call the largest error of its outputs and of its states, and how many elements
# beside the states have changed.
PROGRAM = """
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>
#include "device.h"
#include "core/dtype.cuh"
#include "gated_delta_rule/update_launch.cuh"

using namespace flashvar;
using namespace flashvar::gated_delta_rule;

constexpr int kLengths[] = {LENGTHS};
constexpr int kSequences = sizeof(kLengths) / sizeof(int), kHeads = 2, kStates = kSequences + 1;
static std::mt19937 random_bits(0);
static float drawn() { return std::normal_distribution<float>()(random_bits); }

struct Vectors {
  int64_t width;  // of a token: heads and elements
  std::vector<uint16_t> words;
  Vectors(int tokens, int64_t width) : width(width), words(tokens * width) {
    for (auto& word : words) word = static_cast<uint16_t>(dtype::bf16::pack(drawn(), 0.f));
  }
  double at(int token, int i) const { return dtype::bf16::unpack(words[token * width + i]); }
  // Tokens are those of one sequence after the other, or of a batch's sequences.
  Tensor view(int64_t head_stride) { return {words.data(), width, width, head_stride}; }
};

template <int kHeadDim, class StateDtype>
void call(int dim, int dim_v, int64_t pitch, bool k_first, bool packed) {
  using Word = typename StateDtype::Word;
  int offsets[kSequences + 1] = {0};
  for (int i = 0; i < kSequences; ++i) offsets[i + 1] = offsets[i] + (packed ? kLengths[i] : 1);
  int const tokens = offsets[kSequences];
  int64_t const head = pitch * (k_first ? dim_v : dim), one = kHeads * head;
  Vectors q(tokens, dim), k(tokens, dim), v(tokens, kHeads * dim_v), out(tokens, kHeads * dim_v);
  std::vector<float> g(tokens * kHeads), beta(tokens * kHeads);
  for (auto& x : g) x = -std::abs(drawn());
  for (auto& x : beta) x = std::abs(std::tanh(drawn()));
  std::vector<Word> states(kStates * one);
  for (auto& x : states) {
    float const value = drawn();
    if constexpr (sizeof(Word) == 2) x = static_cast<uint16_t>(StateDtype::pack(value, 0.f));
    else x = value;
  }
  auto const before = states;
  int32_t indices[kSequences];
  for (int i = 0; i < kSequences; ++i) indices[i] = (i + 2) % kStates;

  UpdateProblem problem{};
  problem.sequences = kSequences;
  problem.rows = packed ? Sequences{offsets, 0, tokens} : Sequences{nullptr, 1, 0};
  problem.heads_qk = 1, problem.heads = kHeads, problem.group = kHeads;
  problem.head_dim = dim, problem.head_dim_v = dim_v;
  problem.scale = .5f, problem.qk_l2norm = true, problem.beta_scale = 1.f;
  problem.q = q.view(dim), problem.k = k.view(dim);
  problem.v = v.view(dim_v), problem.out = out.view(dim_v);
  problem.g = {g.data(), kHeads, kHeads, 1, dtype::fp32::kAbi};
  problem.beta = {beta.data(), kHeads, kHeads, 1, dtype::fp32::kAbi};
  problem.state_dtype = StateDtype::kAbi;
  problem.initial_state = {states.data(), one, head, k_first ? 1 : pitch, k_first ? pitch : 1};
  problem.final_state = problem.initial_state;
  problem.state_indices = {indices, 1, 4};
  problem.states = kStates;
  using Launch = UpdateLaunch<Target<80, 166912>, dtype::bf16, kHeadDim>;
  Launch::row().launcher.launch(problem, 0, nullptr);

  double of_out = 0, of_states = 0;
  auto const place = [&](int i, int h, int row, int column) {
    return indices[i] * one + h * head + (k_first ? column * pitch + row : row * pitch + column);
  };
  std::vector<bool> checked(states.size());
  for (int i = 0; i < kSequences; ++i) {
    for (int h = 0; h < kHeads; ++h) {
      for (int column = 0; column < dim_v; ++column) {
        std::vector<double> s(dim);
        for (int row = 0; row < dim; ++row) {
          s[row] = StateDtype::unpack(before[place(i, h, row, column)]);
        }
        for (int t = offsets[i]; t < offsets[i + 1]; ++t) {
          double k_k = 1e-6, q_q = 1e-6, known = 0, found = 0;
          for (int row = 0; row < dim; ++row) {
            k_k += k.at(t, row) * k.at(t, row), q_q += q.at(t, row) * q.at(t, row);
          }
          for (int row = 0; row < dim; ++row) {
            s[row] *= std::exp(g[t * kHeads + h]);
            known += s[row] * k.at(t, row) / std::sqrt(k_k);
          }
          double const update = beta[t * kHeads + h] * (v.at(t, h * dim_v + column) - known);
          for (int row = 0; row < dim; ++row) {
            s[row] += k.at(t, row) / std::sqrt(k_k) * update;
            found += s[row] * q.at(t, row) / std::sqrt(q_q) * problem.scale;
          }
          of_out = std::max(of_out, std::abs(found - out.at(t, h * dim_v + column)));
        }
        for (int row = 0; row < dim; ++row) {
          int64_t const at = place(i, h, row, column);
          checked[at] = true;
          of_states = std::max(of_states, std::abs(s[row] - StateDtype::unpack(states[at])));
        }
      }
    }
  }
  int changed = 0;
  for (size_t at = 0; at < states.size(); ++at) changed += !checked[at] && states[at] != before[at];
  std::printf("%g %g %d\\n", of_out, of_states, changed);
}

template <int kHeadDim>
void calls(int dim, int dim_v, int64_t pitch) {
  int64_t const other = pitch + dim - dim_v > dim ? pitch + dim - dim_v : dim;
  for (bool packed : {true, false}) {
    call<kHeadDim, dtype::bf16>(dim, dim_v, pitch, false, packed);
    call<kHeadDim, dtype::bf16>(dim, dim_v, other, true, packed);
    call<kHeadDim, dtype::fp32>(dim, dim_v, pitch, false, packed);
    call<kHeadDim, dtype::fp32>(dim, dim_v, other, true, packed);
  }
}

int main() {
CALLS
}
"""


def _instance(dim: int) -> int:
    return next(least for least in (64, 128, 256) if dim <= least)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """By shape and states: errors of outputs and states, and elements written beside them."""
    calls = "\n".join(f"  calls<{_instance(k)}>({k}, {v}, {pitch});" for k, v, pitch in SHAPES)
    program = PROGRAM.replace("LENGTHS", str(TOKENS)[1:-1]).replace("CALLS", calls)
    folder = tmp_path_factory.mktemp("update")
    code, text = host_program.run(program, folder, None, "-Og", "-D__CUDACC__")
    assert code == 0
    shapes = [f"{k}x{v} {batch}" for k, v, _ in SHAPES for batch in BATCHES]
    names = [f"{shape} {states}" for shape in shapes for states in STATES]
    lines = [[float(x) for x in line.split()] for line in text.splitlines()]
    return dict(zip(names, lines, strict=True))


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", [f"{k}x{v}" for k, v, _ in SHAPES])
def test_an_update(errors: dict[str, list[float]], shape: str, batch: str, states: str) -> None:
    of_out, of_states, beside = errors[f"{shape} {batch} {states}"]
    assert of_out < 2**-6
    assert of_states < (2**-6 if states.startswith("bf16") else 1e-5)
    assert beside == 0
