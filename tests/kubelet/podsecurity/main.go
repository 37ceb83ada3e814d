// Command podsecurity says why Kubernetes' Pod Security admission would refuse the pods of a job,
// given as JSON, in a namespace of the profile "restricted": one line a reason, none where it admits.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

func main() {
	decoder := json.NewDecoder(os.Stdin)
	decoder.DisallowUnknownFields()
	var job batchv1.Job
	if err := decoder.Decode(&job); err != nil {
		fmt.Println(err)
		return
	}
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	level := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	template := job.Spec.Template
	for _, result := range evaluator.EvaluatePod(level, &template.ObjectMeta, &template.Spec) {
		if !result.Allowed {
			fmt.Println(result.ForbiddenReason+":", result.ForbiddenDetail)
		}
	}
}
