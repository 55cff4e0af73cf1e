// Command advisories writes a database of advisories for grype, of the schema of the release that is built beside it.
//
// Usage: advisories DIRECTORY < advisories.json, a list of objects with the fields of `advisory`.
package main

import (
	"encoding/json"
	"log"
	"os"
	"strings"

	v6 "github.com/anchore/grype/grype/db/v6"
	"github.com/spf13/afero"
)

type advisory struct {
	// Name is the first name that a scan gives, as GHSA-... or CVE-...
	Name string `json:"name"`
	// Ecosystem is "python" or "deb".
	Ecosystem string `json:"ecosystem"`
	// Package is the name of a Python package, or of a source package of Debian 12.
	Package string `json:"package"`
	// Constraint is the range of versions that is affected, empty for all.
	Constraint string `json:"constraint"`
}

func main() {
	log.SetFlags(0)
	var advisories []advisory
	if err := json.NewDecoder(os.Stdin).Decode(&advisories); err != nil {
		log.Fatal(err)
	}
	if err := write(os.Args[1], advisories); err != nil {
		log.Fatal(err)
	}
}

func write(directory string, advisories []advisory) error {
	database, err := v6.NewWriter(v6.Config{DBDirPath: directory})
	if err != nil {
		return err
	}
	if err := database.SetDBMetadata(); err != nil {
		return err
	}
	for _, each := range advisories {
		handle := affected(each)
		if err := database.AddVulnerabilities(handle.Vulnerability); err != nil {
			return err
		}
		if err := database.AddAffectedPackages(handle); err != nil {
			return err
		}
	}
	if err := database.Close(); err != nil {
		return err
	}
	_, err = v6.WriteImportMetadata(afero.NewOsFs(), directory, "test")
	return err
}

func affected(each advisory) *v6.AffectedPackageHandle {
	provider := &v6.Provider{ID: "github", Version: "1"}
	var system *v6.OperatingSystem
	if each.Ecosystem == "deb" {
		provider = &v6.Provider{ID: "debian", Version: "1"}
		system = &v6.OperatingSystem{Name: "debian", ReleaseID: "debian", MajorVersion: "12", Codename: "bookworm"}
	}
	return &v6.AffectedPackageHandle{
		Vulnerability: &v6.VulnerabilityHandle{
			Name:       each.Name,
			Status:     v6.VulnerabilityActive,
			Provider:   provider,
			ProviderID: provider.ID,
			BlobValue:  &v6.VulnerabilityBlob{ID: strings.ToLower(each.Name)},
		},
		OperatingSystem: system,
		Package:         &v6.Package{Ecosystem: each.Ecosystem, Name: each.Package},
		BlobValue: &v6.PackageBlob{
			Ranges: []v6.Range{{Version: v6.Version{Type: each.Ecosystem, Constraint: each.Constraint}}},
		},
	}
}
