# file: linear_cross_entropy.cuh - panels: a lane writes dZ where another has yet to read logits
# case: options backward panels
s/__syncwarp(); .. the logits that lie where this step writes have been read .*/;/
