"""Several machines: how they find each other, stay in touch, and are started. The numbers are execution/'s business."""
