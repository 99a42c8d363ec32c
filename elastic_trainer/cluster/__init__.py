"""Carries control's decisions out on Ray: controller, node agents, workers, placement, a local cluster."""
