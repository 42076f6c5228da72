// Light or dark before anything is painted; the switch in the header changes it.
"use strict";

(() => {
  const chosen = localStorage.getItem("rekindle.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
