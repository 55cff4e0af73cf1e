"""What to change after a failure, by class: said where the container itself left no hint."""

from finetune_job.failures import FailureClass

ADVICE: dict[FailureClass, str] = {
    FailureClass.USER_CONFIG: "Correct the setting that the message names and apply a new job.",
    FailureClass.USER_DATA: "Correct the data set that spec.data.source names.",
    FailureClass.USER_MODEL: "Check the model directory that spec.model.source names: config.json, weights and tokenizer.",
    FailureClass.NON_FINITE: (
        "Lower spec.training.learningRate or spec.training.maxGradNorm, or raise spec.training.warmupRatio; look for records that "
        "are empty or damaged."
    ),
    FailureClass.DEVICE_OUT_OF_MEMORY: (
        "Lower spec.training.microBatchSize or spec.data.maxSequenceLength, set spec.training.activationCheckpointing: Full, "
        "or raise spec.parallelism.nodes."
    ),
    FailureClass.HOST_OUT_OF_MEMORY: "Use a profile with more memory for this role, or lower spec.training.microBatchSize.",
    FailureClass.DISK_FULL: "Enlarge the claim, or lower spec.checkpoint.keep.",
    FailureClass.COLLECTIVE: "Look at the logs of the other ranks on the workspace and at the network between the nodes.",
    FailureClass.STALLED: "Read the stacks of the ranks on the workspace, or raise spec.training.stepTimeoutSeconds.",
    FailureClass.SOURCE_UNAVAILABLE: "Check that the hub or object store of the profile can be reached from the cluster.",
    FailureClass.DESTINATION_REFUSED: "Check spec.output.destination and the Secret that spec.output.secretRef names.",
    FailureClass.DESTINATION_UNAVAILABLE: "Check that the destination can be reached from the cluster.",
    FailureClass.CHECKPOINT_INVALID: "Look at the checkpoints on the workspace; a claim that loses writes damages them.",
    FailureClass.PLAN_MISMATCH: "Somebody changed the plan's ConfigMap; apply the job again under a new name.",
    FailureClass.VERIFICATION_FAILED: "Read verification.json beside the quarantined model before you use it.",
    FailureClass.PREEMPTED: "",
    FailureClass.INFRASTRUCTURE: "Look at the nodes that the pods ran on.",
    FailureClass.NODE_LOST: "Look at the node that the message names.",
    FailureClass.REJECTED: "Look at the node: its kubelet had no room for the pod, or a device plugin failed.",
    FailureClass.IMAGE_PULL: "Check the image of the profile and the pull secrets of its registry.",
    FailureClass.MOUNT: "Create the volume, Secret or ConfigMap that the message names.",
    FailureClass.ADMISSION: "Ask for more quota, or have the policy that the message names allow the pods of this profile.",
    FailureClass.INTERNAL: "Read the exception and the logs of the failing rank on the workspace.",
    FailureClass.UNKNOWN: "No evidence was left; read the logs on the workspace.",
}
