"""Models of other packages for the sweep: small configurations, and pytorchcv's families by their first model.

A package that is not installed has no models here. Each is called with one image of the first side that it takes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Of pytorchcv: other inputs than images, or gigabytes of them.
_NOT_IMAGES = """
alphapose_coco lffd pfpcnet voca nvpattexp visemenet superpointnet jasper jasperdr quartznet raft propainter_rfc
propainter_ip propainter ntsnet_cub prnet
""".split()
_FAMILIES = 100

_ULTRALYTICS = """
yolov5n yolov8n yolov8n-seg yolov9t yolov10n yolo11n yolo11n-cls yolo11n-pose yolo12n yolo26n rtdetr-l
""".split()
_SMP = "Unet UnetPlusPlus FPN PSPNet DeepLabV3Plus PAN Linknet MAnet UPerNet Segformer".split()
_MONAI: dict[str, dict[str, Any]] = {
    "UNet": {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1},
    "BasicUNet": {"features": (16, 16, 32, 32, 32, 16)},
    "SegResNet": {"init_filters": 8},
    "AttentionUnet": {"channels": (8, 16, 32), "strides": (2, 2)},
}
_IMAGES = {"num_labels": 5}
_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("ResNetForImageClassification", {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]}),
    "convnext": ("ConvNextForImageClassification", {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    "vit": ("ViTForImageClassification", {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                                          "intermediate_size": 96, "image_size": 64}),
    "segformer": ("SegformerForSemanticSegmentation", {"hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1],
                                                       "decoder_hidden_size": 32}),
    "detr": ("DetrForObjectDetection", {
        "use_timm_backbone": True, "backbone": "resnet18", "use_pretrained_backbone": False, "d_model": 32,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4}),
    "swin": ("SwinForImageClassification", {"image_size": 64, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 4],
                                            "window_size": 4}),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.5}),
    "regnet": ("RegNetForImageClassification", {"hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8,
                                                "embedding_size": 16}),
    "bit": ("BitForImageClassification", {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1],
                                          "num_groups": 4}),
    "poolformer": ("PoolFormerForImageClassification", {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    "mask2former": ("Mask2FormerForUniversalSegmentation", {
        "backbone_config": {"model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1],
                            "num_heads": [1, 2, 2, 4], "window_size": 4,
                            "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 48,
        "encoder_layers": 1, "decoder_layers": 3, "num_attention_heads": 4, "dim_feedforward": 64, "num_queries": 5}),
}  # fmt: skip
_DIFFUSERS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
                    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                    "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    "AutoencoderKL": {"block_out_channels": (32, 64), "norm_num_groups": 8,
                      "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
    "VQModel": {"block_out_channels": (32, 64), "norm_num_groups": 8, "down_block_types": ("DownEncoderBlock2D",) * 2,
                "up_block_types": ("UpDecoderBlock2D",) * 2},
}  # fmt: skip
_SPANDREL: dict[str, dict[str, Any]] = {
    "SPAN": {"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 16, "upscale": 2},
    "KBNet.KBNet_s": {"width": 16, "middle_blk_num": 1, "enc_blk_nums": [1, 1], "dec_blk_nums": [1, 1]},
    "NAFNet": {"width": 16, "middle_blk_num": 1, "enc_blk_nums": [1, 1], "dec_blk_nums": [1, 1]},
    "OmniSR": {"num_feat": 16, "res_num": 1, "up_scale": 2, "block_num": 1, "window_size": 8},
    "PLKSR": {"dim": 16, "n_blocks": 2, "upscaling_factor": 2},
    "PLKSR.RealPLKSR": {"dim": 16, "n_blocks": 2, "upscaling_factor": 2},
    "RealCUGAN.UpCunet2x": {},
    "SAFMN": {"dim": 16, "n_blocks": 2, "upscaling_factor": 2},
    "MoSR": {"dim": 16, "n_block": 2, "upscale": 2},
    "DRUNet": {"in_nc": 3, "out_nc": 3, "nc": [8, 8, 16, 16], "nb": 1},
    "DnCNN": {"in_nc": 3, "out_nc": 3, "nc": 16, "nb": 5},
    "ESRGAN": {"num_filters": 16, "num_blocks": 2},
    "Compact": {"num_feat": 16, "num_conv": 4},
    "FBCNN": {"nc": [16, 16, 32, 512], "nb": 1},
    "DITN": {"dim": 24, "ITL_blocks": 1, "SAL_blocks": 1, "UFONE_blocks": 1, "upscale": 2, "patch_size": 8},
    "FDAT": {"scale": 2, "embed_dim": 24, "num_groups": 1, "depth_per_group": 2, "num_heads": 4, "window_size": 8,
             "mid_dim": 16},
    "FFTformer": {"dim": 8, "num_blocks": [1, 1, 1], "num_refinement_blocks": 1},
    "HVICIDNet": {"channels": [12, 12, 24, 48]},
    "MoESR": {"scale": 2, "dim": 16, "n_blocks": 1, "n_block": 1, "upsample_dim": 16},
    "RCAN": {"scale": 2, "n_resgroups": 1, "n_resblocks": 2, "n_feats": 16, "reduction": 4},
    "RetinexFormer": {"n_feat": 8, "stage": 1},
    "SAFMNBCIE": {"dim": 16, "n_blocks": 1, "num_layers": 1},
    "SwiftSRGAN": {"num_channels": 16, "num_blocks": 2, "upscale_factor": 2},
    "MixDehazeNet": {"embed_dims": [8, 16, 32, 16, 8], "depths": [1, 1, 1, 1, 1]},
    "Uformer": {"img_size": 64, "embed_dim": 8, "depths": [1] * 9, "num_heads": [1, 2, 2, 2, 2, 2, 2, 2, 1],
                "win_size": 8},
    "DAT": {"img_size": 32, "embed_dim": 64, "split_size": [4, 8], "depth": [2], "num_heads": [4],
            "expansion_factor": 2, "upscale": 2},
    "SwinIR": {"img_size": 32, "embed_dim": 24, "depths": [2], "num_heads": [4], "window_size": 8, "mlp_ratio": 2,
               "upscale": 2, "upsampler": "pixelshuffle"},
    "Swin2SR": {"img_size": 32, "embed_dim": 24, "depths": [2], "num_heads": [4], "window_size": 8, "mlp_ratio": 2,
                "upsampler": "pixelshuffle"},
    "HAT": {"img_size": 32, "embed_dim": 24, "depths": [2], "num_heads": [4], "window_size": 8, "mlp_ratio": 2,
            "squeeze_factor": 6, "upscale": 2, "num_feat": 16},
    "CRAFT": {"window_size": 8, "embed_dim": 64, "depths": [1], "num_heads": [4], "split_size_0": 4,
              "split_size_1": 8, "upscale": 2},
    "DRCT": {"img_size": 32, "embed_dim": 24, "depths": [1], "num_heads": [4], "window_size": 8, "gc": 8,
             "upscale": 2, "upsampler": "pixelshuffle"},
    "RGT": {"img_size": 32, "embed_dim": 24, "depth": [2], "num_heads": [4], "mlp_ratio": 2},
    "DCTLSA": {"nf": 20, "upscale": 2},
}  # fmt: skip


def names(package: str) -> list[str]:
    """The models of a package, the smallest kinds first; none if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return []
    if package == "pytorchcv":
        return _families()
    lists: dict[str, Any] = {
        "spandrel": _SPANDREL,
        "ultralytics": _ULTRALYTICS,
        "transformers": _TRANSFORMERS,
        "diffusers": _DIFFUSERS,
        "segmentation_models_pytorch": _SMP,
        "monai": _MONAI,
    }
    return [*lists[package]]


def build(package: str, name: str) -> nn.Module:
    """A model with random weights."""
    made: nn.Module = _BUILDERS[package](name)
    return made


def sides(package: str, name: str) -> list[int]:
    """The images' sides to try."""
    if package == "pytorchcv":
        return [32] if "cifar" in name else [64, 96, 224, 299]
    return [32, 64] if package == "spandrel" else [64, 128]


def besides(package: str, name: str, images: int) -> tuple[Tensor, ...]:
    """What the model is given beside images: a diffusion model its steps."""
    return (torch.arange(1, images + 1),) if name == "UNet2DModel" else ()


@functools.cache
def _families() -> list[str]:
    from pytorchcv import model_provider

    first: dict[str, str] = {}
    for name, function in model_provider._models.items():
        first.setdefault(function.__module__.rpartition(".")[2], name)
    return [name for family, name in first.items() if family not in _NOT_IMAGES][:_FAMILIES]


def _pytorchcv(name: str) -> nn.Module:
    from pytorchcv.model_provider import get_model

    model: nn.Module = get_model(name)
    for path, module in model.named_modules():  # made for one size of images
        if path.endswith("final_pool") and isinstance(module, nn.AvgPool2d):
            model.set_submodule(path, nn.AdaptiveAvgPool2d(1))
    for buffer in model.buffers():  # the channels that a trained CondenseNet reads
        if buffer.dtype == torch.long and buffer.dim() == 1 and buffer.numel() > 3 and not buffer.any():
            buffer.copy_(torch.randperm(buffer.numel()))
    return model


def _spandrel(name: str) -> nn.Module:
    file, _, kind = name.partition(".")
    module = importlib.import_module(f"spandrel.architectures.{file}")
    return getattr(module, kind or file)(**_SPANDREL[name])  # type: ignore[no-any-return]


def _ultralytics(name: str) -> nn.Module:
    from ultralytics import RTDETR, YOLO

    from smcp_fx.integrations.ultralytics import NarrowYolo

    file = f"{name}.yaml"
    made = RTDETR(file) if name.startswith("rtdetr") else YOLO(file, verbose=False)
    return NarrowYolo(made.model.float())  # as the integration prepares it


def _transformers(name: str) -> nn.Module:
    import transformers

    kind, options = _TRANSFORMERS[name]
    made = getattr(transformers, kind)
    return made(made.config_class(**_IMAGES, **options))  # type: ignore[no-any-return]


def _diffusers(name: str) -> nn.Module:
    import diffusers

    options = {"in_channels": 3, "out_channels": 3, **_DIFFUSERS[name]}
    return getattr(diffusers, name)(**options)  # type: ignore[no-any-return]


def _smp(name: str) -> nn.Module:
    import segmentation_models_pytorch

    made = getattr(segmentation_models_pytorch, name)
    return made(encoder_name="resnet18", encoder_weights=None)  # type: ignore[no-any-return]


def _monai(name: str) -> nn.Module:
    from monai.networks import nets

    kind = getattr(nets, name)
    dims = "spatial_dims" if "spatial_dims" in inspect.signature(kind).parameters else "dimensions"
    return kind(**{dims: 2}, in_channels=3, out_channels=4, **_MONAI[name])  # type: ignore[no-any-return]


_BUILDERS: dict[str, Callable[[str], nn.Module]] = {
    "pytorchcv": _pytorchcv,
    "spandrel": _spandrel,
    "ultralytics": _ultralytics,
    "transformers": _transformers,
    "diffusers": _diffusers,
    "segmentation_models_pytorch": _smp,
    "monai": _monai,
}
PACKAGES = tuple(_BUILDERS)
