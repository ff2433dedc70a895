"""Closed lists of the operations and attributes that a saved model may use, on tensors and numbers, by name.

A file cannot reach anything else. The lists hold no function that calls its arguments, opens files, reads raw
memory or imports. They hold only methods of tensors and sizes.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from smcp_fx.tracing.constant_values import overwritten
from smcp_fx.tracing.modes import by_mode, left_out

_FUNCTIONS: dict[ModuleType, str] = {
    torch: (
        "_assert abs absolute acos acosh adaptive_avg_pool1d adaptive_max_pool1d add addbmm addcdiv addcmul "
        "addmm addmv addr adjoint affine_grid_generator alias_copy all allclose alpha_dropout amax amin "
        "aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort "
        "argwhere as_strided as_strided_copy as_strided_scatter as_tensor asin asinh atan atan2 atanh atleast_1d "
        "atleast_2d atleast_3d avg_pool1d baddbmm batch_norm bernoulli bilinear "
        "binary_cross_entropy_with_logits bincount binomial bitwise_and bitwise_left_shift bitwise_not "
        "bitwise_or bitwise_right_shift bitwise_xor block_diag bmm broadcast_tensors broadcast_to bucketize "
        "cartesian_prod cat cdist ceil celu chain_matmul channel_shuffle cholesky_inverse cholesky_solve "
        "chunk clamp clamp_max clamp_min clip clone column_stack combinations complex concat concatenate conj "
        "conj_physical constant_pad_nd conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
        "conv_transpose3d convolution copysign corrcoef cos cosh cosine_embedding_loss cosine_similarity "
        "count_nonzero cov cross ctc_loss cummax cummin cumprod cumsum cumulative_trapezoid deg2rad det "
        "detach detach_copy diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff digamma "
        "dist div divide dot dropout dsplit dstack einsum embedding embedding_bag empty empty_like eq equal "
        "erf erfc erfinv exp exp2 expand_copy expm1 eye feature_alpha_dropout feature_dropout fix flatten "
        "flip fliplr flipud float_power floor floor_divide fmax fmin fmod frac frexp frobenius_norm full "
        "full_like gather gcd ge geqrf ger get_device gradient greater greater_equal grid_sampler "
        "grid_sampler_2d grid_sampler_3d group_norm gt hardshrink heaviside hinge_embedding_loss histc "
        "histogram hsplit hstack hypot i0 igamma igammac imag index_add index_copy index_fill index_put "
        "index_reduce index_select inner instance_norm inverse is_complex is_conj is_floating_point is_neg "
        "is_nonzero is_same_size is_signed isclose isfinite isin isinf isnan isneginf isposinf isreal istft "
        "kl_div kron kthvalue layer_norm lcm ldexp le lerp less less_equal lgamma linspace log log10 log1p "
        "log2 log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or "
        "logical_xor logit logsumexp lt lu lu_solve lu_unpack margin_ranking_loss masked_fill masked_scatter "
        "masked_select matmul matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d "
        "max_pool3d maximum mean median meshgrid min minimum mm mode moveaxis movedim msort mul multinomial "
        "multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy "
        "native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm "
        "native_norm ne neg negative nextafter nonzero nonzero_static norm norm_except_dim not_equal "
        "normal nuclear_norm numel ones ones_like orgqr ormqr outer pairwise_distance pdist permute permute_copy "
        "pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar polygamma positive pow prelu "
        "prod put quantile rad2deg rand rand_like randint randn randn_like randperm ravel real reciprocal "
        "relu remainder renorm repeat_interleave reshape resolve_conj resolve_neg rms_norm roll rot90 round "
        "row_stack rrelu rsqrt rsub scatter scatter_add scatter_reduce searchsorted select select_copy "
        "select_scatter selu sgn sigmoid sign signbit sin sinc sinh slice_copy slice_inverse slice_scatter "
        "slogdet softmax sort split split_copy split_with_sizes split_with_sizes_copy sqrt square squeeze "
        "squeeze_copy stack std std_mean stft sub subtract sum svd swapaxes swapdims t t_copy take "
        "take_along_dim tan tanh tensor tensor_split tensordot threshold tile topk trace transpose "
        "transpose_copy trapezoid trapz triangular_solve tril triplet_margin_loss triu true_divide trunc "
        "unbind unbind_copy unflatten unfold_copy unique unique_consecutive unravel_index unsafe_chunk "
        "unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy var var_mean vdot view_as_complex "
        "view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack where xlogy zeros "
        "zeros_like "
    ),
    torch.nn.functional: (
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
        "adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices "
        "adaptive_max_pool3d adaptive_max_pool3d_with_indices affine_grid alpha_dropout avg_pool1d avg_pool2d "
        "avg_pool3d batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits celu "
        "channel_shuffle conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "cosine_embedding_loss cosine_similarity cross_entropy ctc_loss dropout dropout1d dropout2d dropout3d "
        "elu embedding embedding_bag feature_alpha_dropout fold fractional_max_pool2d "
        "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices "
        "gaussian_nll_loss gelu glu grid_sample group_norm gumbel_softmax hardshrink hardsigmoid hardswish "
        "hardtanh hinge_embedding_loss huber_loss instance_norm interpolate kl_div l1_loss layer_norm "
        "leaky_relu linear local_response_norm log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d "
        "margin_ranking_loss max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d "
        "max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d mish mse_loss "
        "multi_head_attention_forward multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss "
        "native_channel_shuffle nll_loss normalize one_hot pad pairwise_distance pdist pixel_shuffle "
        "pixel_unshuffle poisson_nll_loss prelu relu relu6 rms_norm rrelu scaled_dot_product_attention selu "
        "sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin softplus softshrink softsign tanh "
        "tanhshrink threshold triplet_margin_loss unfold upsample "
    ),
    torch.linalg: (
        "cholesky cholesky_ex cond cross det diagonal eig eigh eigvals eigvalsh householder_product inv "
        "inv_ex ldl_factor ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matmul matrix_exp "
        "matrix_norm matrix_power matrix_rank matrix_sqrth multi_dot norm pinv polar qr slogdet solve "
        "solve_ex solve_triangular svd svdvals tensorinv tensorsolve vander vecdot vector_norm "
    ),
    torch.fft: (
        "fft fft2 fftn fftshift hfft hfft2 hfftn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn irfft irfft2 "
        "irfftn rfft rfft2 rfftn "
    ),
    torch.special: (
        "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u "
        "chebyshev_polynomial_v chebyshev_polynomial_w digamma entr erf erfc erfcx erfinv exp2 expit expm1 "
        "gammainc gammaincc gammaln hermite_polynomial_h hermite_polynomial_he i0 i0e i1 i1e "
        "laguerre_polynomial_l legendre_polynomial_p log1p log_ndtr log_softmax logit logsumexp "
        "modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln ndtr ndtri "
        "polygamma psi round scaled_modified_bessel_k0 scaled_modified_bessel_k1 "
        "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v "
        "shifted_chebyshev_polynomial_w sinc softmax spherical_bessel_j0 xlog1py xlogy zeta "
    ),
    math: (
        "acos asin atan atan2 ceil cos cosh degrees exp fabs floor fmod gcd hypot isfinite isinf isnan log log10 "
        "log1p log2 pow prod radians sin sinh sqrt tan tanh trunc"
    ),
    operator: (
        "abs add and_ concat contains eq floordiv ge getitem gt iadd iand ifloordiv imatmul imod imul index inv "
        "invert ior ipow is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift "
        "setitem sub truediv truth xor"
    ),
}
#: Each with and without a final underscore, if tensors have both.
_METHODS = (
    "abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all allclose amax amin "
    "aminmax angle any arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort "
    "argwhere as_strided as_strided_scatter asin asinh atan atan2 atanh baddbmm bernoulli bfloat16 "
    "bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm "
    "bool broadcast_to byte cdouble ceil cfloat chalf char cholesky_inverse cholesky_solve chunk clamp "
    "clamp_max clamp_min clip clone conj conj_physical contiguous copysign corrcoef cos cosh "
    "count_nonzero cov cpu cross cummax cummin cumprod cumsum deg2rad det detach diag diag_embed diagflat "
    "diagonal diagonal_scatter diff digamma dim dist div divide dot double dsplit element_size eq equal "
    "erf erfc erfinv exp exp2 expand expand_as expm1 fix flatten flip fliplr flipud float float_power "
    "floor floor_divide fmax fmin fmod frac frexp gather gcd ge geqrf ger get_device greater "
    "greater_equal gt half hardshrink heaviside histc histogram hsplit hypot i0 igamma igammac index_add "
    "index_copy index_fill index_put index_reduce index_select inner int inverse is_complex is_conj "
    "is_contiguous is_floating_point is_neg is_nonzero is_same_size is_signed isclose isfinite isinf "
    "isnan isneginf isposinf isreal istft item kron kthvalue lcm ldexp le lerp less less_equal lgamma log "
    "log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not "
    "logical_or logical_xor logit logsumexp long lt lu lu_solve masked_fill masked_scatter masked_select "
    "matmul matrix_exp matrix_power max maximum mean median min minimum mm mode moveaxis movedim msort "
    "mul multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow "
    "narrow_copy ndimension ne neg negative nelement new_empty new_full new_ones new_tensor new_zeros "
    "nextafter nonzero nonzero_static norm not_equal numel orgqr ormqr outer permute pinverse polygamma "
    "positive pow prelu prod put quantile rad2deg ravel reciprocal relu remainder renorm repeat "
    "repeat_interleave reshape reshape_as resolve_conj resolve_neg roll rot90 round rsqrt scatter "
    "scatter_add scatter_reduce select select_scatter sgn short sigmoid sign signbit sin sinc sinh size "
    "slice_inverse slice_scatter slogdet softmax sort split split_with_sizes sqrt square squeeze std stft "
    "storage_offset stride sub subtract sum sum_to_size svd swapaxes swapdims t take take_along_dim tan "
    "tanh tensor_split tile to topk trace transpose triangular_solve tril triu true_divide trunc type "
    "type_as unbind unflatten unfold unique unique_consecutive unsafe_chunk unsafe_split "
    "unsafe_split_with_sizes unsqueeze var vdot view view_as vsplit where xlogy "
)
_IN_PLACE_METHODS = (
    "cauchy copy exponential fill fill_diagonal geometric log_normal normal random uniform zero "
)
#: Attributes read with `getattr`, and the kind of the result (see `smcp_fx.serialization.call_rules`).
TENSOR_ATTRIBUTES = {
    **dict.fromkeys("H T imag mH mT real data".split(), "tensor"),
    **dict.fromkeys(
        "is_cpu is_cuda is_leaf is_meta is_sparse itemsize nbytes ndim requires_grad".split(), "plain"
    ),
    # fields of the tuples that torch's functions return
    **dict.fromkeys(
        "L LD LU Q R S U V Vh bin_edges eigenvalues eigenvectors exponent hist indices info logabsdet mantissa "
        "pivots rank residuals sign singular_values solution values".split(),
        "tensor",
    ),
    "device": "device",
    "dtype": "dtype",
    "layout": "plain",
    "shape": "size",
}
ATTRIBUTES = {
    "input": TENSOR_ATTRIBUTES,
    "tensor": TENSOR_ATTRIBUTES,
    "device": dict.fromkeys(("index", "type"), "plain"),
    "dtype": dict.fromkeys(("is_complex", "is_floating_point", "itemsize"), "plain"),
    "range": dict.fromkeys("bits eps max min resolution smallest_normal tiny".split(), "plain"),
}
#: Methods of other values than tensors: `torch.Size`, and dicts that the model is called with.
SIZE_METHODS = frozenset(("count", "index", "numel"))
DICT_METHODS = frozenset(("get", "items", "keys", "values"))
#: Operators, and functions that libraries declare as leaves of tracing, by defining module.
LEAF_FUNCTIONS = {
    "torch.ops.torchvision": "deform_conv2d nms ps_roi_align ps_roi_pool roi_align roi_pool",
    "timm.layers.attention": "maybe_add_mask resolve_self_attn_mask",
    "timm.layers.pos_embed": "resample_abs_pos_embed resample_abs_pos_embed_nhwc",
    "timm.layers.pos_embed_sincos": (
        "_apply_coord_augs _build_grid _freq_buffer_dtype get_mixed_grid make_coords_dinov3"
    ),
    "timm.models.crossvit": "scale_image",
    "timm.models.davit": "window_reverse",
    "timm.models.gcvit": "window_reverse",
    "timm.models.hiera": "get_resized_mask",
    "timm.models.maxxvit": "grid_reverse grid_reverse_nchw window_reverse window_reverse_nchw",
    "timm.models.mvitv2": "cal_rel_pos_type reshape_post_pool reshape_pre_pool",
    "timm.models.naflexvit": "create_attention_mask global_pool_naflex",
    "timm.models.nest": "deblockify",
    "timm.models.swin_transformer": "window_reverse",
    "timm.models.swin_transformer_v2": "window_reverse",
    "timm.models.swin_transformer_v2_cr": "window_reverse",
    "timm.models.vision_transformer_sam": "get_rel_pos",
    "torchvision.models.googlenet": "GoogLeNetOutputs",
    "torchvision.models.inception": "InceptionOutputs",
    "torchvision.models.swin_transformer": (
        "_get_relative_position_bias _patch_merging_pad shifted_window_attention"
    ),
    "torchvision.models.video.mvit": "_add_rel_pos _add_shortcut _squeeze _unsqueeze",
    "torchvision.models.video.swin_transformer": (
        "_compute_attention_mask_3d _compute_pad_size_3d _get_relative_position_bias _get_window_and_shift_size "
        "shifted_window_attention_3d"
    ),
    "torchvision.ops.drop_block": "drop_block2d drop_block3d",
    "torchvision.ops.ps_roi_align": "ps_roi_align",
    "torchvision.ops.ps_roi_pool": "ps_roi_pool",
    "torchvision.ops.roi_align": "roi_align",
    "torchvision.ops.roi_pool": "roi_pool",
    "torchvision.ops.stochastic_depth": "stochastic_depth",
}


_OTHERS: dict[str, Callable[..., Any]] = {
    "builtins.dict": dict,
    "builtins.getattr": getattr,
    "builtins.len": len,
    "builtins.list": list,
    "builtins.round": round,
    "builtins.tuple": tuple,
    "collections.OrderedDict": OrderedDict,
    "smcp_fx.tracing.modes.by_mode": by_mode,
    "smcp_fx.tracing.modes.left_out": left_out,
    "smcp_fx.tracing.constant_values.overwritten": overwritten,
    "torch.finfo": torch.finfo,
    "torch.iinfo": torch.iinfo,
}


@lru_cache(maxsize=1)
def functions() -> dict[str, Callable[..., Any]]:
    """Return every function that a graph may call and this version of torch has, by name."""
    by_name: dict[str, Callable[..., Any]] = dict(_OTHERS)
    for space, names in _FUNCTIONS.items():
        for name in names.split():
            for spelling in (name, f"{name}_") if space in (torch, torch.nn.functional) else (name,):
                if callable(vars(space).get(spelling)):
                    by_name[f"{space.__name__}.{spelling}"] = vars(space)[spelling]
    return by_name


@lru_cache(maxsize=1)
def function_names() -> dict[Callable[..., Any], str]:
    """Return the inverse of `functions`, with each function's first name."""
    return {function: name for name, function in reversed(list(functions().items()))}


@lru_cache(maxsize=1)
def tensor_methods() -> frozenset[str]:
    """Return every tensor method that a graph may call and this version of torch has."""
    names = [spelling for name in _METHODS.split() for spelling in (name, f"{name}_")]
    names += [f"{name}_" for name in _IN_PLACE_METHODS.split()]
    return frozenset(name for name in names if callable(getattr(torch.Tensor, name, None)))
