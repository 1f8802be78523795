"""The Triton forward kernel: the same algorithm and the same features as the CUDA kernels.

Names: `i_` index, `o_` offset, `p_` pointer, `m_` mask, `b_` block. One program computes one block
of query rows of one head. Online softmax in base 2 (FlashAttention-2, Dao 2023): the scale and
log2(e) are one positive factor, applied in the multiply-add of the exponent.

A head dim that is no power of two is split in two that are, HEAD and TAIL (96 = 64 + 32), so that
little of a tensor-core tile is padding; TAIL is 0 where one is enough. Offsets are 64 bits wide.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_rows(
    p_first,  # row 0, dim 0 of the block
    o_rows,  # [rows]: of the block, from 0
    o_dims,  # [dims]
    stride,  # between rows, int64
    rows,  # how many rows of the block exist
    HEAD_DIM: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_DIMS: tl.constexpr,
):
    """[rows, dims] of a matrix; outside of it nothing is read and the value is 0."""
    p_block = p_first + (o_rows[:, None] * stride + o_dims[None, :])
    if MASK_ROWS and MASK_DIMS:
        return tl.load(
            p_block, mask=(o_rows[:, None] < rows) & (o_dims[None, :] < HEAD_DIM), other=0.0
        )
    elif MASK_ROWS:
        return tl.load(p_block, mask=o_rows[:, None] < rows, other=0.0)
    elif MASK_DIMS:
        return tl.load(p_block, mask=o_dims[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(p_block)


@triton.jit
def _attend(
    b_acc,  # [BLOCK_Q, HEAD] float32, not yet divided by the row sum
    b_acc_tail,  # [BLOCK_Q, TAIL]
    b_max,  # [BLOCK_Q] float32: maximum of scale * score * log2(e) so far
    b_sum,  # [BLOCK_Q] float32: sum of the weights so far
    b_q,  # [BLOCK_Q, HEAD]
    b_q_tail,  # [BLOCK_Q, TAIL]
    p_k,  # key 0, dim 0 of the head
    p_v,
    k_stride,  # between keys, int64
    v_stride,
    o_last,  # [BLOCK_Q]: the last key that each row may see
    start,
    stop,
    seqlen_k,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys `start` to `stop` into the state; without MASKED every row sees all of them."""
    MASK_HEAD: tl.constexpr = HEAD > HEAD_DIM
    MASK_TAIL: tl.constexpr = HEAD + TAIL > HEAD_DIM
    o_rows = tl.arange(0, BLOCK_KV)
    o_head = tl.arange(0, HEAD)
    for i_key in range(start, stop, BLOCK_KV):
        left = seqlen_k - i_key
        p_k_block = p_k + i_key * k_stride
        p_v_block = p_v + i_key * v_stride
        # [BLOCK_KV, HEAD]
        b_k = _load_rows(p_k_block, o_rows, o_head, k_stride, left, HEAD_DIM, MASKED, MASK_HEAD)
        b_s = tl.dot(b_q, tl.trans(b_k))
        if TAIL > 0:
            o_tail = HEAD + tl.arange(0, TAIL)
            # [BLOCK_KV, TAIL]
            b_k_tail = _load_rows(
                p_k_block, o_rows, o_tail, k_stride, left, HEAD_DIM, MASKED, MASK_TAIL
            )
            b_s = tl.dot(b_q_tail, tl.trans(b_k_tail), b_s)
        if MASKED:
            m_visible = (o_rows < left)[None, :]
            if CAUSAL:
                m_visible = m_visible & ((i_key + o_rows)[None, :] <= o_last[:, None])
            b_s = tl.where(m_visible, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
        b_base = b_new
        if MASKED:
            # A row that has seen nothing yet: 0 keeps -inf - -inf from becoming NaN.
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * scale_log2 - b_base[:, None])
        b_rescale = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
        b_max = b_new
        b_p = b_p.to(b_q.dtype)
        # [BLOCK_KV, HEAD]
        b_v = _load_rows(p_v_block, o_rows, o_head, v_stride, left, HEAD_DIM, MASKED, MASK_HEAD)
        b_acc = tl.dot(b_p, b_v, b_acc * b_rescale[:, None])
        if TAIL > 0:
            o_tail = HEAD + tl.arange(0, TAIL)
            # [BLOCK_KV, TAIL]
            b_v_tail = _load_rows(
                p_v_block, o_rows, o_tail, v_stride, left, HEAD_DIM, MASKED, MASK_TAIL
            )
            b_acc_tail = tl.dot(b_p, b_v_tail, b_acc_tail * b_rescale[:, None])
    return b_acc, b_acc_tail, b_max, b_sum


# Rows start on 16 bytes, and strides are passed in units of that many 16-bit elements: so the
# compiler knows it whatever the head dim.
STRIDE_UNIT = tl.constexpr(8)

# Nothing is specialised on these: they change from call to call.
_RUNTIME = [
    *("heads_q", "group", "seqlen_q", "seqlen_k", "scale_log2"),
    *(f"{name}_{axis}" for name in ("q", "k", "v", "out") for axis in ("batch", "row", "head")),
]


@triton.jit(do_not_specialize=_RUNTIME)
def attention_fwd_kernel(
    p_q,  # [batch, seqlen_q, heads_q, HEAD_DIM]; strides in units of STRIDE_UNIT elements
    p_k,  # [batch, seqlen_k, heads_q / group, HEAD_DIM]
    p_v,  # as p_k
    p_out,  # as p_q, written
    p_lse,  # [batch, heads_q, seqlen_q] float32, contiguous, written; may be None
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    out_batch,
    out_row,
    out_head,
    heads_q,
    group,  # query heads that share a key head
    seqlen_q,
    seqlen_k,
    scale_log2,  # |scale| * log2(e), positive
    SIGN: tl.constexpr,  # of the scale: 1, -1 or 0
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One block of query rows; the grid is batch x heads_q x blocks, all on one axis."""
    blocks = tl.cdiv(seqlen_q, BLOCK_Q)
    i_block = tl.program_id(0) % blocks
    if CAUSAL:
        i_block = blocks - 1 - i_block  # the longest first: less of a tail at the end
    i_row = tl.program_id(0) // blocks
    i_batch = (i_row // heads_q).to(tl.int64)
    i_head = (i_row % heads_q).to(tl.int64)
    i_head_kv = i_head // group
    i_query = i_block * BLOCK_Q

    q_stride = q_row.to(tl.int64) * STRIDE_UNIT
    p_q += (i_batch * q_batch + i_head * q_head) * STRIDE_UNIT + i_query.to(tl.int64) * q_stride
    p_k += (i_batch * k_batch + i_head_kv * k_head) * STRIDE_UNIT
    p_v += (i_batch * v_batch + i_head_kv * v_head) * STRIDE_UNIT
    k_stride = k_row.to(tl.int64) * STRIDE_UNIT
    v_stride = v_row.to(tl.int64) * STRIDE_UNIT

    o_rows = tl.arange(0, BLOCK_Q)
    o_head = tl.arange(0, HEAD)
    left = seqlen_q - i_query
    # [BLOCK_Q, HEAD]
    b_q = _load_rows(p_q, o_rows, o_head, q_stride, left, HEAD_DIM, True, HEAD > HEAD_DIM)
    if SIGN != 1:
        b_q = (b_q * SIGN).to(p_q.dtype.element_ty)
    b_q_tail = b_q
    b_acc = tl.zeros([BLOCK_Q, HEAD], tl.float32)
    b_acc_tail = b_acc
    if TAIL > 0:
        o_tail = HEAD + tl.arange(0, TAIL)
        # [BLOCK_Q, TAIL]
        b_q_tail = _load_rows(
            p_q, o_rows, o_tail, q_stride, left, HEAD_DIM, True, HEAD + TAIL > HEAD_DIM
        )
        if SIGN != 1:
            b_q_tail = (b_q_tail * SIGN).to(p_q.dtype.element_ty)
        b_acc_tail = tl.zeros([BLOCK_Q, TAIL], tl.float32)
    b_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)

    # Keys up to `unmasked` are seen by every row of the block, those from `stop` on by none.
    unmasked = seqlen_k
    stop = seqlen_k
    o_last = i_query + o_rows
    if CAUSAL:
        diagonal = seqlen_k - seqlen_q  # row i sees key i + diagonal and all before it
        o_last = o_last + diagonal
        unmasked = tl.minimum(unmasked, tl.maximum(i_query + diagonal + 1, 0))
        stop = tl.minimum(stop, tl.maximum(i_query + BLOCK_Q + diagonal, 0))
    unmasked = unmasked // BLOCK_KV * BLOCK_KV
    b_acc, b_acc_tail, b_max, b_sum = _attend(
        b_acc, b_acc_tail, b_max, b_sum, b_q, b_q_tail, p_k, p_v, k_stride, v_stride, o_last,
        0, unmasked, seqlen_k, scale_log2,
        HEAD_DIM, HEAD, TAIL, BLOCK_KV, CAUSAL, False,
    )  # fmt: skip
    b_acc, b_acc_tail, b_max, b_sum = _attend(
        b_acc, b_acc_tail, b_max, b_sum, b_q, b_q_tail, p_k, p_v, k_stride, v_stride, o_last,
        unmasked, stop, seqlen_k, scale_log2,
        HEAD_DIM, HEAD, TAIL, BLOCK_KV, CAUSAL, True,
    )  # fmt: skip

    # A row that saw nothing has sum 0: its output is 0 and its log-sum-exp -inf.
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_scale = 1.0 / b_sum
    m_rows = o_rows < left
    out_stride = out_row.to(tl.int64) * STRIDE_UNIT
    p_out += (i_batch * out_batch + i_head * out_head) * STRIDE_UNIT
    p_out += i_query.to(tl.int64) * out_stride
    tl.store(
        p_out + (o_rows[:, None] * out_stride + o_head[None, :]),
        (b_acc * b_scale[:, None]).to(p_out.dtype.element_ty),
        mask=m_rows[:, None] & (o_head[None, :] < HEAD_DIM),
    )
    if TAIL > 0:
        o_tail = HEAD + tl.arange(0, TAIL)
        tl.store(
            p_out + (o_rows[:, None] * out_stride + o_tail[None, :]),
            (b_acc_tail * b_scale[:, None]).to(p_out.dtype.element_ty),
            mask=m_rows[:, None] & (o_tail[None, :] < HEAD_DIM),
        )
    if p_lse is not None:
        LN2: tl.constexpr = 0.6931471805599453
        p_lse += (i_batch * heads_q + i_head) * seqlen_q + i_query
        tl.store(p_lse + o_rows, (b_max + tl.log2(b_sum)) * LN2, mask=m_rows)
