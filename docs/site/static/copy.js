// A button on each block of code that copies it, without the prompt of a shell.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("article div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").innerText.replace(/^\$ /gm, ""));
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.append(button);
  }
});
