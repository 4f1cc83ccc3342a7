# file: cross_entropy.cuh - smoothing's mean is over the stride
# case: forward f32 auto: lengths
s/{a.softcap > 0.0f ? 1.0f : a.logit_scale, a.label_smoothing, a.z_loss, weight, a.vocab}/{a.softcap > 0.0f ? 1.0f : a.logit_scale, a.label_smoothing, a.z_loss, weight, a.logits_stride}/
