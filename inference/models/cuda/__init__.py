"""The step on a CUDA device: decode from CUDA graphs in buckets, prefill eagerly, attention by block table.

``decoder`` is the ``StepModel``; ``batch`` lays out a step, ``linear`` holds the matrices, ``attention`` and
``flash_infer`` are two ways to attend, ``graphs`` keeps what was captured, and ``device`` says what computes. Only
``flash_infer`` and the capture itself need a device: everything else runs on ``cpu`` too, by the same code.
"""
