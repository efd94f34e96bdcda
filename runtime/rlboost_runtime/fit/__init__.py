"""Whether a job fits its machines: arithmetic on the model's config.json and the job, without torch.

Enter at `plan.fit_plan`; `shape` has the sizes of models, `memory` the bytes of a GPU. Every figure is
computed, none is measured here.
"""
