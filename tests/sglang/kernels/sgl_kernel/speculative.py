"""What SGLang's speculative decoding calls of its kernel package on a CPU, in plain torch: as the Triton kernels of
``sglang/kernels/ops/speculative`` say, of which each has a twin there.
"""

from __future__ import annotations

import ctypes

import torch

QLEN_ONLY = 1
"""Of SGLang's ``TreeMaskMode``: a node's row of the mask has the drafted tokens alone, as SGLang asks for on a CPU."""


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    sibling: torch.Tensor,
    topk: int,
    depth: int,
    nodes: int,
    mask_mode: int,
) -> None:
    """Link each request's chain of drafted tokens, behind the last one that is certain, and say where they are and
    what each attends to.
    """
    if topk != 1 or mask_mode != QLEN_ONLY:
        raise NotImplementedError("only chains of drafted tokens have a stand-in on this machine")
    requests, chain = len(seq_lens), torch.arange(nodes)
    index.copy_(torch.arange(requests)[:, None] * nodes + chain)
    next_token[:, :-1] = chain[1:]
    positions.view(requests, nodes).copy_(seq_lens[:, None] + chain)
    mask.view(requests, nodes, nodes).copy_(torch.ones(nodes, nodes, dtype=torch.bool).tril())


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Of each request's tree, the longest path whose tokens are what the model itself makes."""
    made = target_predict.reshape(-1)
    for request in range(candidates.shape[0]):
        last = int(retrive_index[request, 0])
        accept_index[request, 0] = last
        node, accepted = 0, 0
        while accepted + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[request, node])
            while node != -1 and candidates[request, node] != made[last]:
                node = int(retrive_next_sibling[request, node])
            if node == -1:
                break
            predicts[last] = made[last]
            accepted += 1
            last = int(retrive_index[request, node])
            accept_index[request, accepted] = last
        accept_token_num[request] = accepted
        predicts[last] = made[last]


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """Each request's last accepted token."""
    rows = torch.arange(len(accept_lens)) * stride
    bonus_tokens.copy_(accept_tokens.reshape(-1)[rows + accept_lens - 1])


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move rows within each of a pool's tensors, of which there are only addresses and the rows' bytes."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, row in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        moved = [ctypes.string_at(base + source * row, row) for source in sources]
        for target, content in zip(targets, moved, strict=True):
            ctypes.memmove(base + target * row, content, row)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    columns: int,
) -> None:
    """Of each request, the slots behind its tokens that its drafts are written to."""
    behind = torch.arange(topk * columns)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], seq_lens[:, None] + behind].reshape(-1))


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Each request's slots from its start to its end, one request after the other."""
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, start:end] for row, start, end in bounds])
    out_cache_loc[: len(slots)] = slots
