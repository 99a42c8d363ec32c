"""Feeds the workers: the order of samples, dataset folders, and the engines that read them by position."""
