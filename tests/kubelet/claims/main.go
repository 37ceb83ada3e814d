// Command claims says what the API server finds wrong with a ResourceClaimTemplate, given as JSON.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/runtime/serializer"

	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/apis/resource/validation"
)

func main() {
	var text json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&text); err != nil {
		fmt.Println(err)
		return
	}
	codecs := serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict)
	object, _, err := codecs.UniversalDecoder(resource.SchemeGroupVersion).Decode(text, nil, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, one := range validation.ValidateResourceClaimTemplate(object.(*resource.ResourceClaimTemplate)) {
		fmt.Println(one)
	}
}
