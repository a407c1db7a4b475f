// Returns what is wrong with the text that is seen: too small, off the screen, or over another text.
() => {
  const seen = [], faults = [], root = document.querySelector("dialog[open]") ?? document.body;
  const say = (what, text) => faults.push(`${what}: ${text.slice(0, 40)}`);
  const along = (a, b, low, high) => Math.min(a[high], b[high]) - Math.max(a[low], b[low]);
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, owner = node.parentElement, range = document.createRange();
    const hidden = owner.closest("script, style, option, title, thead, .name") || !owner.checkVisibility();
    if (hidden || !node.data.trim()) continue;
    range.selectNodeContents(node);
    if (parseFloat(getComputedStyle(owner).fontSize) < 10) say("small", node.data);
    for (const box of range.getClientRects()) {
      if (box.left < 0 || box.right > innerWidth + 1) say("off the screen", node.data);
      const over = seen.find(one => along(box, one.box, "left", "right") > 1 && along(box, one.box, "top", "bottom") > 4);
      if (over) say("overlap", `${node.data} / ${over.text}`);
      seen.push({box, text: node.data});
    }
  }
  for (const cell of root.querySelectorAll("td")) {  // of a card: between its label and its end
    const label = getComputedStyle(cell, "::before"), range = document.createRange();
    if (label.content === "none" || !cell.checkVisibility()) continue;
    range.selectNodeContents(cell);
    const inner = range.getBoundingClientRect(), outer = cell.getBoundingClientRect();
    if (inner.left < outer.left + parseFloat(label.width) - 1 || inner.right > outer.right + 1) say("cell", cell.innerText);
  }
  for (const box of [document.scrollingElement, ...root.querySelectorAll("section")]) {
    if (box.scrollWidth > box.clientWidth + 1) say(`${box.scrollWidth} wide`, box.innerText);
  }
  return faults;
}
