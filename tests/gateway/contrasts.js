// Returns WCAG's contrast of each colour of text with the background of cards.
() => {
  const linear = part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
  const light = colour => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map(part => linear(part / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const section = document.querySelector("section"), probe = section.appendChild(document.createElement("i"));
  const card = light(getComputedStyle(section).backgroundColor);
  const found = ["--text", "--dim", "--good", "--bad"].map(name => {
    probe.style.color = `var(${name})`;
    const [low, high] = [card, light(getComputedStyle(probe).color)].sort((a, b) => a - b);
    return [name, (high + .05) / (low + .05)];
  });
  probe.remove();
  return Object.fromEntries(found);
}
