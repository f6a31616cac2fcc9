"""One file per page of MindSpore's tutorials; its tests have the names of the page's sections."""
