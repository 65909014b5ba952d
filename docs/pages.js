// The search is a worker, which browsers start from a server alone: opened from the disk, a page is shown without it.
if (location.protocol === "file:") document.documentElement.classList.add("from-disk");
