"""What readers call the contenders and the ways of a call, in tables and in pictures."""

from __future__ import annotations

from typing import Final

CONTENDERS: Final = {
    "flashvar-cuda": "flashvar (CUDA)",
    "flashvar-sm80": "flashvar (mma.sync, PTX of sm_80)",
    "flashvar-triton": "flashvar (Triton)",
    "sdpa-flash": "SDPA FlashAttention-2",
    "sdpa-cudnn": "SDPA cuDNN",
    "flex": "FlexAttention, compiled",
    "sdpa-efficient": "SDPA memory-efficient",
    "flash-attn": "flash-attn",
    "flash-attn-3": "FlashAttention-3 (vLLM's build)",
    "flash-attn-4": "FlashAttention-4",
    "flashinfer": "FlashInfer",
    "xformers": "xformers",
    "sageattention": "SageAttention 1 (approximate)",
}
# The contenders of `run.py ops`.
OF_OPS: Final = {
    "flashvar": "flashvar",
    "copy": "plain copy",
    "fla": "flash-linear-attention",
    "flash-qla": "FlashQLA",
    "causal-conv1d": "causal-conv1d",
    "torch": "torch's functions",
    "sdpa-flash": "SDPA FlashAttention-2",
    "sdpa-cudnn": "SDPA cuDNN",
}
# The layers of `run.py layers`.
LAYERS: Final = {
    "gated-delta-net": "gated delta net, flashvar",
    "fla-gated-delta-net": "gated delta net, FLA",
    "attention": "softmax attention, flashvar",
    "sdpa": "softmax attention, SDPA",
}
# How a row of `run.py host` begins, and whom it times: without a backend that is CUDA.
HOST_CALLERS: Final = {
    "flashvar": "flashvar-cuda",
    "flashvar-triton": "flashvar-triton",
    "sdpa-flash": "sdpa-flash",
    "sdpa-cudnn": "sdpa-cudnn",
}
# How it ends, and what the call has to do.
HOST_WAYS: Final = {
    "eager": "forward, no gradient",
    "dispatcher": "the same, through torch's dispatcher alone",
    "gradient": "forward, inputs that require gradients",
    "step": "forward and backward",
}
# How a row begins that is of another op; the name of its cell follows.
HOST_OF_OP: Final = "op, "
# The op that a cell is of, by the first word of its name.
OP_OF_CELL: Final = {
    "merge": "merge_states",
    "convolution": "causal_conv1d",
    "forward": "gated_delta_rule",
    "update": "gated_delta_rule",
}
# The calls of `run.py integrations`.
INTEGRATION_CALLS: Final = {
    "direct": "`flashvar.attention`",
    "direct and three transposes": "`flashvar.attention`, q, k and v transposed first",
    "transformers": "transformers",
    "transformers, one row": "transformers, batch of 1",
    "sdpa": "torch, after `activate()`",
    "sdpa, rows first in memory": "torch, after `activate()`, transposed q, k and v",
    "Attend": "`Attend`",
    "xformers": "xformers",
}
# The cells of `run.py models`.
MODELS: Final = {
    "gpt2-xl": "GPT-2 XL",
    "llama-3-8b": "Llama 3 8B",
    "qwen3-0.6b": "Qwen3 0.6B",
    "phi-2": "Phi-2",
    "gemma-7b": "Gemma 7B",
    "bert-base": "BERT base",
    "vit-l-16": "ViT-L/16",
    "siglip-so400m": "SigLIP So400m",
    "whisper-large-encoder": "Whisper large, encoder",
    "stable-diffusion-64": "Stable Diffusion, 64 x 64",
    "stable-diffusion-32": "Stable Diffusion, 32 x 32",
    "stable-diffusion-16": "Stable Diffusion, 16 x 16",
    "llama-3-70b-tp8": "Llama 3 70B, on one of 8 GPUs",
    "falcon-7b": "Falcon 7B",
    "smollm-135m": "SmolLM 135M",
    "llama-3-8b-decode": "Llama 3 8B, decoding",
    "llama-3-8b-decode-long": "Llama 3 8B, decoding, long cache",
    "llama-3-8b-drafts": "Llama 3 8B, speculative decoding",
    "gpt-oss-drafts": "GPT-OSS, speculative decoding",
    "perceiver": "Perceiver, cross-attention",
    "sdxl-text": "SDXL, cross-attention to text",
    "swin-t": "Swin-T",
}
# The packed sequences of `run.py shapes`.
PACKED: Final = {
    "varlen-equal": "8 of 2,048 tokens, 16 x 128, causal",
    "varlen-documents": "16 of 90 to 4,096 tokens, 16 x 128, causal",
    "varlen-documents-full": "16 of 90 to 4,096 tokens, 32 x 64",
    "varlen-one-giant": "one of 8,192 and 7 of 128 tokens, 16 x 128, causal",
}
# The steps of `run.py build`.
BUILD_STEPS: Final = {
    "hdim64-cold": "one head dim, from nothing",
    "hdim64-header": "the same, after a change of a kernel header",
    "hdim64-unchanged": "the same, without a change",
    "wheels-all": "all wheels, from nothing",
    "wheels-all-to-cache": "all wheels, into an empty compiler cache",
    "wheels-all-from-cache": "all wheels again, from that cache",
}


def note_on_wheel(version: str) -> str:
    """What a wheel of this version has that a release's wheel has not, or ""."""
    label = version.partition("+")[2].split(".")
    return "with PTX, which releases leave out" if "ptx" in label else ""
