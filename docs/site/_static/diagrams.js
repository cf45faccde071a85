// Draw the diagrams of a page in the colours of the theme.
document.addEventListener("DOMContentLoaded", () => {
  const blocks = [...document.querySelectorAll("div.mermaid pre")];
  for (const block of blocks) {
    block.className = "mermaid";
    block.textContent = block.textContent.trim();
  }
  const theme = document.body.dataset.theme;
  const dark = theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  mermaid.initialize({ startOnLoad: false, securityLevel: "strict", theme: dark ? "dark" : "neutral" });
  mermaid.run({ nodes: blocks });
});
