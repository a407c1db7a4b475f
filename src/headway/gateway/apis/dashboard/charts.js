// Charts: lines over time, drawn at the size that they have on the page, so that text is never stretched.
const COLOURS = ["--blue", "--amber", "--green", "--pink", "--orange", "--sky"].map(name => `var(${name})`);
const DASHES = ["none", "7 4", "2 3", "10 3 2 3"];  // 24 classes look different
const LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 22;

function svgNode(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// The unit of an axis: the least round number of which four or fewer reach the top.
function roundStep(most) {
  const power = 10 ** Math.floor(Math.log10(most / 4));
  return [1, 2, 5, 10].map(digit => digit * power).find(step => 4 * step >= most * .9999);
}

function timeTicks(from, to, width) {
  const steps = [60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 14400, 21600, 43200];
  const step = steps.find(seconds => (to - from) / seconds * 70 <= width) ?? 86400;
  const offset = 60 * new Date(1000 * to).getTimezoneOffset(), ticks = [];  // so that ticks are at round local times
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) ticks.push(at);
  return ticks;
}

// series: {name, colour, dash, values}, a value or null at each of `ends`. format: of a value. least, most: of the axis.
function chart(id, {ends, from, to, series, format, least = 0, most, about}) {
  const svg = document.getElementById(id), box = svg.getBoundingClientRect(), nodes = [], size = `0 0 ${box.width} ${box.height}`;
  if (svg.matches(":hover") && matchMedia("(hover: hover)").matches && svg.getAttribute("viewBox") === size) return;  // it is being read
  const [width, height] = [box.width - LEFT - RIGHT, box.height - TOP - BOTTOM];
  if (width <= 0) return;
  const values = series.flatMap(one => one.values).filter(value => value !== null);
  const peak = most ?? (Math.max(...values, 0) || 1), step = roundStep(peak - least), top = most ?? step * Math.ceil(peak / step - .001);
  const x = at => LEFT + width * (at - from) / (to - from), y = value => TOP + height * (1 - (value - least) / (top - least));
  for (let value = least; value <= top * 1.001; value += step) {
    nodes.push(svgNode("line", {x1: LEFT, x2: LEFT + width, y1: y(value), y2: y(value), stroke: "var(--rule)"}));
    nodes.push(svgNode("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, format(value).replace(/\.0+(?= |\/)/, "")));
  }
  for (const at of timeTicks(from, to, width)) {
    nodes.push(svgNode("line", {x1: x(at), x2: x(at), y1: TOP + height, y2: TOP + height + 4, stroke: "var(--dim)"}));
    const anchor = x(at) > LEFT + width - 18 ? "end" : x(at) < LEFT + 18 ? "start" : "middle";
    nodes.push(svgNode("text", {x: x(at), y: TOP + height + 16, "text-anchor": anchor}, clock(at)));
  }
  for (const one of series) nodes.push(...line(one, ends, x, y));
  ends.forEach((end, i) => {  // what the pointer is over says its figures
    const begin = i ? ends[i - 1] : from, rect = svgNode("rect", {x: x(begin), y: TOP, width: Math.max(x(end) - x(begin), 0), height, fill: "transparent"});
    const labels = series.filter(one => one.values[i] !== null).map(one => `${one.name} ${format(one.values[i])}`);
    rect.append(svgNode("title", {}, [clock(end, true), ...labels].join("\n")));
    nodes.push(rect);
  });
  if (!values.length) nodes.push(svgNode("text", {x: LEFT + width / 2, y: TOP + height / 2, "text-anchor": "middle"}, "nothing in this time"));
  svg.replaceChildren(...nodes);
  svg.setAttribute("viewBox", size);
  svg.setAttribute("aria-label", about);
}

// A value beside which there is none is a point.
function line(one, ends, x, y) {
  let path = "", down = false;
  const points = [];
  one.values.forEach((value, i) => {
    if (value === null) { down = false; return; }
    const at = `${x(ends[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    if (!down && (one.values[i + 1] ?? null) === null) points.push(svgNode("circle", {cx: x(ends[i]), cy: y(value), r: 2, fill: one.colour}));
    path += `${down ? "L" : "M"}${at}`;
    down = true;
  });
  if (!path) return points;
  return [...points, svgNode("path", {d: path, fill: "none", stroke: one.colour, "stroke-width": 2, "stroke-dasharray": one.dash, "data-series": one.name})];
}

function keys(id, series) {
  document.getElementById(id).replaceChildren(...series.map(one => {
    const key = document.createElement("span"), sample = svgNode("svg", {viewBox: "0 0 26 12", "aria-hidden": "true"});
    sample.append(svgNode("line", {x1: 0, x2: 26, y1: 6, y2: 6, stroke: one.colour, "stroke-width": 3, "stroke-dasharray": one.dash}));
    key.className = "key";
    key.append(sample, named(one.name), element("span", "", one.summary));
    return key;
  }));
}
