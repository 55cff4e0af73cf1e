module finetune-operator.test/probe

go 1.26.0
