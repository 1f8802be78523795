"""The order of a key tile's steps in the wgmma backward: producer and consumers must agree."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import host_program
import pytest

# What query_iterator.cuh takes of this header, which needs the driver's.
_KEY_TILE = """
#pragma once
#include <cstdint>
#include "cuda_runtime_api.h"
namespace flashvar::sm90::attention {
struct BwdArgs {
  struct { int32_t group; } problem;
  int32_t query_tiles;
};
}
"""
# Prints `head m` of each step of the producer. Exits with 1 where the iterator of consumers is at
# another step, 2 where it has another predecessor, 3 where it has another number of steps.
_PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "sm90/attention/query_iterator.cuh"
using namespace flashvar::sm90::attention;

struct Tile {
  int32_t begin, end;
  uint32_t part;
  bool descending, by_head;

  uint32_t part_of_heads() const { return part; }
  bool reversed() const { return descending; }
  bool heads_outermost(const BwdArgs&) const { return by_head; }
  uint32_t query_tile(const BwdArgs& args, uint32_t head, uint32_t m) const {
    return head * args.query_tiles + 5 + m;  // 5: tiles of the sequences before this one
  }
};

int main(int, char** values) {
  auto const value = [&](int i) { return std::atoi(values[i]); };
  int const order = value(4);
  Tile const tile{value(1), value(2), static_cast<uint32_t>(value(3)), order != 0, order == 2};
  BwdArgs const args{{value(5)}, 40};
  using Iterator = QueryIterator<Tile>;
  Iterator it(args, tile);
  uint32_t previous = Iterator::kNone;
  int fault = 0;
  for_each_step(args, tile, [&](uint32_t head, int32_t m) {
    uint32_t const number = tile.query_tile(args, head, m);
    if (it.number != number || it.m != m) fault = 1;
    if (it.previous != previous) fault = 2;
    std::printf("%u %d\\n", head, m);
    previous = number;
    it.advance(args);
  });
  return it.left != 0 ? 3 : fault;
}
"""

# Ascending, with heads varying fastest; descending, likewise; descending, heads outermost.
_ASCENDING, _DESCENDING, _BY_HEAD = range(3)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    return host_program.executable(_PROGRAM, folder, {"sm90/attention/key_tile.cuh": _KEY_TILE})


@host_program.needs_compiler
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("part", [0, 2])
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 4), (3, 8), (4, 4)])
@pytest.mark.parametrize("order", [_ASCENDING, _DESCENDING, _BY_HEAD])
def test_producer_and_consumers_visit_the_same_steps(
    order: int, begin: int, end: int, part: int, group: int, program: Path
) -> None:
    code, printed = host_program.answer(program, *map(str, (begin, end, part, order, group)))
    assert code == 0, "producer and consumers differ"
    heads, blocks = range(part * group, (part + 1) * group), list(range(begin, end))
    if order != _ASCENDING:
        blocks.reverse()
    expected = (
        list(product(heads, blocks))
        if order == _BY_HEAD
        else [(head, m) for m in blocks for head in heads]
    )
    assert [tuple(map(int, line.split())) for line in printed.splitlines()] == expected
