"""One VM as any source says it: document, plan, target file, process, guest."""
