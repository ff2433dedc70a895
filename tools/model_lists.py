"""Which models the sweep runs: all of torchvision but optical flow, timm's families, and other packages' models.

timm's are the smallest variants of each family; ``side`` is the image's side where the model's own is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import model_libraries
from torch import Tensor, nn

TIMM = """
resnet10t resnet18d resnet26t resnet50c seresnet18 ecaresnet26t ecaresnetlight seresnext26d_32x4d
resnetaa34d resnetblur18 resnetrs50 resnext50d_32x4d wide_resnet50_2 legacy_seresnet18 legacy_xception
res2net50_14w_8s res2next50 resnest14d skresnet18 skresnext50_32x4d resnetv2_18 resnetv2_50x1_bit
resnetv2_50d_gn resnetv2_50d_evos resnetv2_50d_frn cspresnet50 cspresnext50 cspdarknet53 cs3darknet_focus_s
cs3sedarknet_l darknet53 cspnext_tiny dla34 dla46x_c dla60_res2net dla60_res2next hrnet_w18_small
hrnet_w18_ssld dpn48b dpn68 vovnet39a ese_vovnet19b_dw eca_vovnet39b ese_vovnet39b_evos repvgg_a0
mobileone_s0 gernet_s resnet32ts eca_resnext26ts gcresnet33ts gcresnext26ts bat_resnext26ts resnet51q
regnetz_b16 regnetz_b16_evos resnet61q botnet26t_256 halonet26t lambda_resnet26t sebotnet33ts_256
haloregnetz_b ghostnet_050 ghostnetv2_100 ghostnetv3_050 repghostnet_050 efficientnet_b0 efficientnet_es
efficientnet_lite0 efficientnetv2_rw_t tf_efficientnet_b0 tf_efficientnetv2_b0 tf_efficientnet_lite0
tf_efficientnet_es mixnet_s tf_mixnet_s tinynet_e mnasnet_small semnasnet_075 mobilenetv1_100
mobilenetv2_050 mobilenet_edgetpu_100 fbnetc_100 spnasnet_100 mobilenetv4_conv_small
mobilenetv4_hybrid_medium efficientnet_b0_g8_gn efficientnet_b0_gn efficientnet_b1_pruned
efficientnet_cc_b0_4e mobilenetv3_small_050 mobilenetv3_large_075 tf_mobilenetv3_small_075
tf_mobilenetv3_small_minimal_100 lcnet_050 fbnetv3_b hardcorenas_a lcnetv2_small mobilenetv5_300m_enc
regnetx_002 regnety_002 regnetv_040 regnetz_005 regnety_160 nf_resnet26 nf_resnet50 nf_seresnet26
nf_regnet_b0 nfnet_l0 eca_nfnet_l0 dm_nfnet_f0 tresnet_m tresnet_v2_l rexnet_100 rexnetr_100 selecsls42
selecsls60b xception41 xception41p inception_v3 inception_v4 inception_resnet_v2 nasnetalarge pnasnet5large
densenet121 densenetblur121d vgg11 vgg11_bn convnext_atto convnext_atto_ols convnext_atto_rms
convnextv2_atto convnext_pico convmixer_768_32 inception_next_atto poolformer_s12 poolformerv2_s12
convformer_s18 caformer_s18 focalnet_tiny_srf mobilevit_xxs mobilevitv2_050 edgenext_xx_small
edgenext_small_rw fastvit_t8 fastvit_sa12 fastvit_mci0 efficientformer_l1 efficientformerv2_s0
efficientvit_b0 efficientvit_l1 efficientvit_m0 levit_128s levit_conv_128s coatnet_nano_rw_224 coatnet_0_224
coatnext_nano_rw_224 maxvit_rmlp_pico_rw_256 maxxvit_rmlp_nano_rw_256 coatnet_bn_0_rw_224 hgnet_tiny
hgnetv2_b0 repvit_m0_9 repvit_m1 starnet_s050 rdnet_tiny mambaout_femto fasternet_t0 swiftformer_xs shvit_s1
iformer_t efficientvim_m1 lowformer_b0 cpubone_nano csatv2 nextvit_small visformer_tiny vitamin_small_224
pvt_v2_b0 gcvit_xxtiny davit_tiny nest_tiny vit_tiny_patch16_224 deit_tiny_patch16_224
deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224 vit_relpos_small_patch16_224
eva02_tiny_patch14_336
vit_tiny_r_s16_p8_224 cait_xxs24_224 coat_lite_tiny convit_tiny crossvit_9_240 mvitv2_tiny hiera_tiny_224
pit_ti_224 tnt_s_patch16_224 twins_pcpvt_small twins_svt_small volo_d1_224 xcit_nano_12_p16_224
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224 sequencer2d_s
mixer_s32_224 gmixer_12_224 gmlp_ti16_224 resmlp_12_224 samvit_base_patch16_224
""".split()


#: Least sides, where deep maps of one pixel make random weights amplify rounding a billion times.
_LEAST = {
    "resnetv2_50d_frn": 128,
    "mobilenetv4_hybrid_medium": 128,
    "regnetv_040": 64,
    "efficientnet_b5": 64,
    "efficientnet_b7": 64,
    "efficientnet_v2_m": 64,
    "efficientnet_v2_l": 64,
}


#: The side that detection models other than the SSDs resize their images to.
DETECTOR_SIDE = 96


@dataclass(frozen=True)
class Entry:
    """One model: its family (the section of the document), its name, and how to build it."""

    family: str
    name: str

    @property
    def key(self) -> str:
        """Return a key unique to this entry."""
        return f"{self.family}/{self.name}"

    def build(self) -> nn.Module:
        """Build it with random weights, for small images if possible."""
        if self.family in model_libraries.PACKAGES:
            return model_libraries.build(self.family, self.name)
        if self.family == "timm":
            import timm

            return timm.create_model(self.name, pretrained=False)  # type: ignore[no-any-return]
        from torchvision import models

        options: dict[str, Any] = {"weights": None}
        if self.family in ("segmentation", "detection"):
            options["weights_backbone"] = None
        if self.family == "detection" and not self.name.startswith("ssd"):
            options.update(min_size=DETECTOR_SIDE, max_size=DETECTOR_SIDE)
        if self.name.startswith("keypoint"):  # random weights find no person, and the head would see nothing
            options.update(box_score_thresh=0.0, box_detections_per_img=2)
        if self.name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        if self.name.startswith("vit_"):
            options["image_size"] = _vit_side(self.name)
        return models.get_model(self.name, **options)  # type: ignore[no-any-return]

    def besides(self, images: int) -> tuple[Tensor, ...]:
        """What the model is given beside images."""
        packaged = self.family in model_libraries.PACKAGES
        return model_libraries.besides(self.family, self.name, images) if packaged else ()

    def shapes(self, model: nn.Module) -> list[tuple[int, ...]]:
        """Input shapes to try, the cheapest first; batch 2."""
        if self.family in model_libraries.PACKAGES:
            return [(2, 3, side, side) for side in model_libraries.sides(self.family, self.name)]
        if self.family == "timm":
            config: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
            own = tuple(config["input_size"])
            sides = (
                [side for side in (32, 64, 96, 128) if _LEAST.get(self.name, 0) <= side < own[-1]]
                if not config.get("fixed_input_size")
                else []
            )
            return [(2, own[0], side, side) for side in sides] + [(2, *own)]
        if self.family == "detection":
            return [(2, 3, DETECTOR_SIDE, DETECTOR_SIDE)]
        if self.family == "video":
            large = self.name == "s3d" or self.name.startswith("mvit")
            return [(1, 3, 16, 224, 224) if large else (2, 3, 4, 32, 32)]
        sides = [
            224
            if self.name.startswith("maxvit")
            else _vit_side(self.name)
            if self.name.startswith("vit_")
            else 32
        ]
        least = _LEAST.get(self.name, 0)
        return [(2, 3, side, side) for side in [*sides, 64, 75, 96, 128, 224, 299] if side >= least]


def _of_package(package: str) -> Callable[[], list[str]]:
    return lambda: model_libraries.names(package)


def _vit_side(name: str) -> int:
    return 128 if name.endswith("_32") else 112


def entries() -> list[Entry]:
    """Every model, family by family."""
    from torchvision import models

    listed: list[tuple[str, Callable[[], list[str]]]] = [
        ("classification", lambda: models.list_models(module=models)),
        ("segmentation", lambda: models.list_models(module=models.segmentation)),
        ("video", lambda: models.list_models(module=models.video)),
        ("detection", lambda: models.list_models(module=models.detection)),
        ("timm", lambda: list(dict.fromkeys(TIMM))),
        *((package, _of_package(package)) for package in model_libraries.PACKAGES),
    ]
    found = []
    for family, names in listed:
        found += [Entry(family, name) for name in names()]
    return found
