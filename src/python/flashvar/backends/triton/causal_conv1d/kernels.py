"""The Triton kernels of causal_conv1d: bound by memory, a program has BLOCK_ROWS tokens at a time.

Positions of tokens are relative to the start of their sequence; tokens of the initial state have
negative positions. Each tap loads its tokens again, mostly from the cache. Whatever values
cu_seqlens and indices have, no address is outside its tensor.
"""
# Compile-time constants are upper case, as is usual in Triton (N803). Triton cannot unpack tuples
# in tuple displays (RUF005).
# ruff: noqa: N803, RUF005
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# Sizes that change from call to call: kernels are not specialized for their values.
RUNTIME: Final = ("seqlen", "sequences", "steps", "pool")


@triton.jit
def _sequence_of(p_cu_seqlens, o_row, i_batch, seqlen, sequences, steps):
    """For each row of a batch entry: the number, first row and length of its sequence."""
    o_zero = tl.zeros_like(o_row)
    if p_cu_seqlens is None:
        return o_zero + i_batch, o_zero, o_zero + seqlen
    else:
        # Bisection for the last sequence that begins at the row or before it, which is not empty.
        o_low = o_zero
        o_high = o_zero + sequences - 1
        for _ in range(steps):
            o_middle = (o_low + o_high + 1) // 2
            m_low = tl.load(p_cu_seqlens + o_middle).to(tl.int64) <= o_row
            o_low = tl.where(m_low, o_middle, o_low)
            o_high = tl.where(m_low, o_high, tl.maximum(o_middle - 1, o_low))
        o_begin = tl.load(p_cu_seqlens + o_low).to(tl.int64)
        return o_low, o_begin, tl.load(p_cu_seqlens + o_low + 1).to(tl.int64) - o_begin


@triton.jit
def _bounds_of(p_cu_seqlens, o_sequence, m_sequence, seqlen):
    """For each sequence: its batch entry, its first row there and its length."""
    if p_cu_seqlens is None:
        return o_sequence, tl.zeros_like(o_sequence), tl.zeros_like(o_sequence) + seqlen
    else:
        o_begin = tl.load(p_cu_seqlens + o_sequence, mask=m_sequence, other=0).to(tl.int64)
        o_end = tl.load(p_cu_seqlens + o_sequence + 1, mask=m_sequence, other=0).to(tl.int64)
        return tl.zeros_like(o_sequence), o_begin, o_end - o_begin


@triton.jit
def _tokens(
    p_x, p_state, o_position, o_sequence, o_batch, o_begin, o_length, o_dim, m_block, x_batch,
    x_row, x_dim, state_sequence, state_dim, state_column, seqlen, COLUMNS: tl.constexpr,
    i_oldest=None,
):  # fmt: skip
    """The tokens at positions of their sequences; 0 where there is none.

    i_oldest: where states are circular buffers, the column of the oldest token.
    """
    o_row = o_begin + o_position
    m_x = (o_position >= 0) & (o_position < o_length) & (o_row >= 0) & (o_row < seqlen)
    p = p_x + (o_batch * x_batch + o_row * x_row)[:, None] + o_dim[None, :] * x_dim
    b_x = tl.load(p, mask=m_x[:, None] & m_block, other=0.0).to(tl.float32)
    if p_state is not None:
        o_column = o_position + COLUMNS
        m_state = (o_position < 0) & (o_column >= 0)
        if i_oldest is not None:
            o_column = (o_column + i_oldest) % COLUMNS
        o_state = o_sequence * state_sequence + o_column * state_column
        p = p_state + o_state[:, None] + o_dim[None, :] * state_dim
        b_x += tl.load(p, mask=m_state[:, None] & m_block, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _convolved(
    p_x, p_weight, p_bias, p_state, o_position, SHIFT: tl.constexpr, o_sequence, o_batch, o_begin,
    o_length, o_dim, m_block, x_batch, x_row, x_dim, weight_dim, weight_tap, bias_dim,
    state_sequence, state_dim, state_column, seqlen, dim, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, i_oldest=None,
):  # fmt: skip
    """The convolution before the activation, SHIFT tokens after the positions."""
    b_z = tl.zeros(m_block.shape, tl.float32)
    for j in tl.static_range(WIDTH):
        b_x = _tokens(
            p_x, p_state, o_position + (SHIFT + j - (WIDTH - 1)), o_sequence, o_batch, o_begin,
            o_length, o_dim, m_block, x_batch, x_row, x_dim, state_sequence, state_dim,
            state_column, seqlen, COLUMNS, i_oldest,
        )  # fmt: skip
        p = p_weight + o_dim * weight_dim + j * weight_tap
        b_z += b_x * tl.load(p, mask=o_dim < dim, other=0.0).to(tl.float32)[None, :]
    if p_bias is not None:
        b_z += tl.load(p_bias + o_dim * bias_dim, mask=o_dim < dim, other=0.0).to(tl.float32)
    return b_z


@triton.jit(do_not_specialize=RUNTIME)
def fwd_kernel(
    p_y,  # [batch, seqlen, dim]
    p_x,
    p_weight,  # [dim, WIDTH]
    p_bias,  # [dim]; None: 0
    p_residual,  # like x; None: 0
    p_state,  # [sequences, dim, COLUMNS]; None: 0
    p_cu_seqlens,  # [sequences + 1]; None: each of the batch is a sequence
    y_batch,
    y_row,
    y_dim,
    x_batch,
    x_row,
    x_dim,
    weight_dim,
    weight_tap,
    bias_dim,
    residual_batch,
    residual_row,
    residual_dim,
    state_sequence,
    state_dim,
    state_column,
    seqlen,
    sequences,
    steps,  # of the search for a sequence
    dim,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes one block of y. The grid has one axis; blocks of the same tokens are adjacent."""
    dims = tl.cdiv(dim, BLOCK_DIM)
    i_block = tl.program_id(0) // dims
    blocks = tl.cdiv(seqlen, BLOCK_ROWS)
    i_batch = (i_block // blocks).to(tl.int64)
    o_row = (i_block % blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_dim = (tl.program_id(0) % dims).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    m_block = (o_row < seqlen)[:, None] & (o_dim < dim)[None, :]
    o_sequence, o_begin, o_length = _sequence_of(
        p_cu_seqlens, o_row, i_batch, seqlen, sequences, steps
    )
    b_y = _convolved(
        p_x, p_weight, p_bias, p_state, o_row - o_begin, 0, o_sequence, i_batch, o_begin, o_length,
        o_dim, m_block, x_batch, x_row, x_dim, weight_dim, weight_tap, bias_dim, state_sequence,
        state_dim, state_column, seqlen, dim, COLUMNS, WIDTH,
    )  # fmt: skip
    if SILU:
        b_y *= tl.sigmoid(b_y)
    if p_residual is not None:
        o_residual = i_batch * residual_batch + o_row * residual_row
        p = p_residual + o_residual[:, None] + o_dim[None, :] * residual_dim
        b_y += tl.load(p, mask=m_block, other=0.0).to(tl.float32)
    p = p_y + (i_batch * y_batch + o_row * y_row)[:, None] + o_dim[None, :] * y_dim
    tl.store(p, b_y.to(p_y.dtype.element_ty), mask=m_block)


@triton.jit(do_not_specialize=RUNTIME)
def final_kernel(
    p_final,  # [sequences, dim, COLUMNS], contiguous
    p_x,  # [batch, seqlen, dim]
    p_state,
    p_cu_seqlens,
    x_batch,
    x_row,
    x_dim,
    state_sequence,
    state_dim,
    state_column,
    seqlen,
    sequences,
    dim,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes final states. Rows of a block are columns of states, of all sequences in order."""
    dims = tl.cdiv(dim, BLOCK_DIM)
    o_row = (tl.program_id(0) // dims).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_dim = (tl.program_id(0) % dims).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    o_sequence = o_row // COLUMNS
    m_row = o_sequence < sequences
    m_block = m_row[:, None] & (o_dim < dim)[None, :]
    o_column = o_row % COLUMNS
    o_batch, o_begin, o_length = _bounds_of(p_cu_seqlens, o_sequence, m_row, seqlen)
    b_x = _tokens(
        p_x, p_state, o_length - COLUMNS + o_column, o_sequence, o_batch, o_begin, o_length, o_dim,
        m_block, x_batch, x_row, x_dim, state_sequence, state_dim, state_column, seqlen, COLUMNS,
    )  # fmt: skip
    o_final = (o_sequence * dim)[:, None] * COLUMNS + o_dim[None, :] * COLUMNS + o_column[:, None]
    tl.store(p_final + o_final, b_x.to(p_final.dtype.element_ty), mask=m_block)


@triton.jit(do_not_specialize=RUNTIME)
def update_kernel(
    p_y,  # [batch, seqlen, dim]
    p_x,
    p_weight,
    p_bias,
    p_residual,
    p_state,  # [pool, dim, COLUMNS], written
    p_indices,  # [batch]; None: the states are in the order of the batch
    p_positions,  # [batch]; None: the newest token is in the last column
    y_batch,
    y_row,
    y_dim,
    x_batch,
    x_row,
    x_dim,
    weight_dim,
    weight_tap,
    bias_dim,
    residual_batch,
    residual_row,
    residual_dim,
    state_sequence,
    state_dim,
    state_column,
    seqlen,
    pool,
    dim,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes BLOCK_DIM channels of a sequence: y of all of its tokens, then its state."""
    dims = tl.cdiv(dim, BLOCK_DIM)
    i_batch = (tl.program_id(0) // dims).to(tl.int64)
    o_dim = (tl.program_id(0) % dims).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    m_dim = (o_dim < dim)[None, :]
    o_block = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    i_state = i_batch
    if p_indices is not None:
        i_state = tl.load(p_indices + i_batch).to(tl.int64)
    inside = (i_state >= 0) & (i_state < pool)
    # The output without a state: 0 for a negative index, NaN for an index past the pool.
    absent = tl.where(i_state < 0, 0.0, float("nan"))
    i_oldest = None
    if p_positions is not None:
        i_oldest = (tl.load(p_positions + i_batch).to(tl.int64) % COLUMNS + COLUMNS) % COLUMNS
    for start in range(0, seqlen, BLOCK_ROWS):
        o_row = start + o_block
        m_block = (o_row < seqlen)[:, None] & m_dim
        b_y = _convolved(
            p_x, p_weight, p_bias, p_state, o_row, 0, i_state, i_batch, 0, seqlen, o_dim,
            m_block & inside, x_batch, x_row, x_dim, weight_dim, weight_tap, bias_dim,
            state_sequence, state_dim, state_column, seqlen, dim, COLUMNS, WIDTH, i_oldest,
        )  # fmt: skip
        if SILU:
            b_y *= tl.sigmoid(b_y)
        if p_residual is not None:
            o_residual = i_batch * residual_batch + o_row * residual_row
            p = p_residual + o_residual[:, None] + o_dim[None, :] * residual_dim
            b_y += tl.load(p, mask=m_block, other=0.0).to(tl.float32)
        b_y = tl.where(inside, b_y, absent)
        p = p_y + (i_batch * y_batch + o_row * y_row)[:, None] + o_dim[None, :] * y_dim
        tl.store(p, b_y.to(p_y.dtype.element_ty), mask=m_block)
    # A column takes a token of a later column or of x, so columns are written in ascending order.
    for start in tl.static_range(0, COLUMNS, BLOCK_ROWS):
        o_column = start + o_block
        m_block = (o_column < COLUMNS)[:, None] & m_dim & inside
        o_position = seqlen - COLUMNS + o_column
        b_x = _tokens(
            p_x, p_state, o_position, i_state, i_batch, 0, seqlen, o_dim, m_block, x_batch, x_row,
            x_dim, state_sequence, state_dim, state_column, seqlen, COLUMNS, i_oldest,
        )  # fmt: skip
        if i_oldest is not None:  # circular buffers: tokens of the state stay in their columns
            o_column = (o_column + seqlen + i_oldest) % COLUMNS
            m_block &= (o_position >= 0)[:, None]
        tl.debug_barrier()  # all threads have read the columns that are overwritten here
        p = p_state + i_state * state_sequence
        p += o_column[:, None] * state_column + o_dim[None, :] * state_dim
        tl.store(p, b_x.to(p_state.dtype.element_ty), mask=m_block)


@triton.jit
def _grad_convolved(
    p_grad_y, p_x, p_weight, p_bias, p_state, o_position, SHIFT: tl.constexpr, o_sequence, o_batch,
    o_begin, o_length, o_dim, m_block, grad_batch, grad_row, grad_dim, x_batch, x_row, x_dim,
    weight_dim, weight_tap, bias_dim, state_sequence, state_dim, state_column, seqlen, dim,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The gradient of the convolution before the activation, SHIFT tokens after the positions."""
    b_grad = _tokens(
        p_grad_y, None, o_position + SHIFT, o_sequence, o_batch, o_begin, o_length, o_dim, m_block,
        grad_batch, grad_row, grad_dim, 0, 0, 0, seqlen, 0,
    )  # fmt: skip
    if SILU:
        b_z = _convolved(
            p_x, p_weight, p_bias, p_state, o_position, SHIFT, o_sequence, o_batch, o_begin,
            o_length, o_dim, m_block, x_batch, x_row, x_dim, weight_dim, weight_tap, bias_dim,
            state_sequence, state_dim, state_column, seqlen, dim, COLUMNS, WIDTH,
        )  # fmt: skip
        b_gate = tl.sigmoid(b_z)
        b_slope = b_gate * (1.0 + b_z * (1.0 - b_gate))
        # 0 where there is no token: b_slope is NaN there if a weight is infinite.
        m_token = (o_position + SHIFT >= 0) & (o_position + SHIFT < o_length)
        b_grad = tl.where(m_token[:, None], b_grad * b_slope, 0.0)
    return b_grad


@triton.jit
def _grad_tokens(
    p_grad_y, p_grad_final, p_x, p_weight, p_bias, p_state, o_position, o_sequence, o_batch,
    o_begin, o_length, o_dim, m_block, grad_batch, grad_row, grad_dim, final_sequence, final_dim,
    final_column, x_batch, x_row, x_dim, weight_dim, weight_tap, bias_dim, state_sequence,
    state_dim, state_column, seqlen, dim, FINAL_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The gradients of the tokens at positions of their sequences, those of the state included."""
    b_grad_x = tl.zeros(m_block.shape, tl.float32)
    for i in tl.static_range(WIDTH):
        b_grad = _grad_convolved(
            p_grad_y, p_x, p_weight, p_bias, p_state, o_position, i, o_sequence, o_batch, o_begin,
            o_length, o_dim, m_block, grad_batch, grad_row, grad_dim, x_batch, x_row, x_dim,
            weight_dim, weight_tap, bias_dim, state_sequence, state_dim, state_column, seqlen, dim,
            COLUMNS, WIDTH, SILU,
        )  # fmt: skip
        p = p_weight + o_dim * weight_dim + (WIDTH - 1 - i) * weight_tap
        b_weight = tl.load(p, mask=o_dim < dim, other=0.0).to(tl.float32)[None, :]
        # 0 where there is no token: 0 times an infinite weight would be NaN.
        m_token = (o_position + i >= 0) & (o_position + i < o_length)
        b_grad_x += tl.where(m_token[:, None], b_grad * b_weight, 0.0)
    if p_grad_final is not None:
        o_column = o_position - o_length + FINAL_COLUMNS
        m_final = (o_column >= 0) & (o_column < FINAL_COLUMNS)
        o_final = o_sequence * final_sequence + o_column * final_column
        p = p_grad_final + o_final[:, None] + o_dim[None, :] * final_dim
        b_grad_x += tl.load(p, mask=m_final[:, None] & m_block, other=0.0).to(tl.float32)
    return b_grad_x


@triton.jit(do_not_specialize=RUNTIME)
def bwd_kernel(
    p_grad_x,  # [batch, seqlen, dim], written
    p_grad_weight,  # [chunks, WIDTH + 1, dim], contiguous, written; the last row is of the bias
    p_grad_y,  # [batch, seqlen, dim]
    p_grad_final,  # [sequences, dim, FINAL_COLUMNS]; None: 0
    p_x,
    p_weight,
    p_bias,
    p_state,
    p_cu_seqlens,
    grad_x_batch,
    grad_x_row,
    grad_x_dim,
    grad_batch,
    grad_row,
    grad_dim,
    final_sequence,
    final_dim,
    final_column,
    x_batch,
    x_row,
    x_dim,
    weight_dim,
    weight_tap,
    bias_dim,
    state_sequence,
    state_dim,
    state_column,
    seqlen,
    sequences,
    steps,
    dim,
    FINAL_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes the gradients of CHUNK tokens, and their part of the sums for weight and bias."""
    dims = tl.cdiv(dim, BLOCK_DIM)
    i_chunk = (tl.program_id(0) // dims).to(tl.int64)
    chunks = tl.cdiv(seqlen, CHUNK)
    i_batch = i_chunk // chunks
    o_dim = (tl.program_id(0) % dims).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    b_parts = (tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32),) * (WIDTH + 1)
    first = i_chunk % chunks * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, seqlen), BLOCK_ROWS):
        o_row = start + tl.arange(0, BLOCK_ROWS)
        m_block = (o_row < seqlen)[:, None] & (o_dim < dim)[None, :]
        o_sequence, o_begin, o_length = _sequence_of(
            p_cu_seqlens, o_row, i_batch, seqlen, sequences, steps
        )
        o_position = o_row - o_begin
        b_grad_x = _grad_tokens(
            p_grad_y, p_grad_final, p_x, p_weight, p_bias, p_state, o_position, o_sequence, i_batch,
            o_begin, o_length, o_dim, m_block, grad_batch, grad_row, grad_dim, final_sequence,
            final_dim, final_column, x_batch, x_row, x_dim, weight_dim, weight_tap, bias_dim,
            state_sequence, state_dim, state_column, seqlen, dim, FINAL_COLUMNS, COLUMNS, WIDTH,
            SILU,
        )  # fmt: skip
        o_grad_x = i_batch * grad_x_batch + o_row * grad_x_row
        p = p_grad_x + o_grad_x[:, None] + o_dim[None, :] * grad_x_dim
        tl.store(p, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_block)
        b_grad = _grad_convolved(
            p_grad_y, p_x, p_weight, p_bias, p_state, o_position, 0, o_sequence, i_batch, o_begin,
            o_length, o_dim, m_block, grad_batch, grad_row, grad_dim, x_batch, x_row, x_dim,
            weight_dim, weight_tap, bias_dim, state_sequence, state_dim, state_column, seqlen, dim,
            COLUMNS, WIDTH, SILU,
        )  # fmt: skip
        # Adds to the first part and moves it to the end of the tuple: after WIDTH + 1 rotations the
        # parts are in order again.
        for j in tl.static_range(WIDTH):
            b_x = _tokens(
                p_x, p_state, o_position + (j - (WIDTH - 1)), o_sequence, i_batch, o_begin,
                o_length, o_dim, m_block, x_batch, x_row, x_dim, state_sequence, state_dim,
                state_column, seqlen, COLUMNS,
            )  # fmt: skip
            b_parts = b_parts[1:] + (b_parts[0] + b_grad * b_x,)
        b_parts = b_parts[1:] + (b_parts[0] + b_grad,)
    for j in tl.static_range(WIDTH + 1):
        p = p_grad_weight + (i_chunk * (WIDTH + 1) + j) * dim + o_dim
        tl.store(p, tl.sum(b_parts[j], 0), mask=o_dim < dim)


@triton.jit(do_not_specialize=RUNTIME)
def bwd_state_kernel(
    p_grad_state,  # [sequences, dim, COLUMNS], contiguous, written
    p_grad_y,
    p_grad_final,
    p_x,
    p_weight,
    p_bias,
    p_state,
    p_cu_seqlens,
    grad_batch,
    grad_row,
    grad_dim,
    final_sequence,
    final_dim,
    final_column,
    x_batch,
    x_row,
    x_dim,
    weight_dim,
    weight_tap,
    bias_dim,
    state_sequence,
    state_dim,
    state_column,
    seqlen,
    sequences,
    dim,
    FINAL_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes the gradients of states. Rows of a block are columns of states: see final_kernel."""
    dims = tl.cdiv(dim, BLOCK_DIM)
    o_row = (tl.program_id(0) // dims).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_dim = (tl.program_id(0) % dims).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    o_sequence = o_row // COLUMNS
    m_row = o_sequence < sequences
    m_block = m_row[:, None] & (o_dim < dim)[None, :]
    o_column = o_row % COLUMNS
    o_batch, o_begin, o_length = _bounds_of(p_cu_seqlens, o_sequence, m_row, seqlen)
    b_grad = _grad_tokens(
        p_grad_y, p_grad_final, p_x, p_weight, p_bias, p_state, o_column - COLUMNS, o_sequence,
        o_batch, o_begin, o_length, o_dim, m_block, grad_batch, grad_row, grad_dim, final_sequence,
        final_dim, final_column, x_batch, x_row, x_dim, weight_dim, weight_tap, bias_dim,
        state_sequence, state_dim, state_column, seqlen, dim, FINAL_COLUMNS, COLUMNS, WIDTH, SILU,
    )  # fmt: skip
    o_state = (o_sequence * dim)[:, None] * COLUMNS + o_dim[None, :] * COLUMNS + o_column[:, None]
    tl.store(p_grad_state + o_state, b_grad.to(p_grad_state.dtype.element_ty), mask=m_block)
