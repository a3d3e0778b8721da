// Charts: two lines over the steps of a history, drawn as SVG in the pixels that there are.

const NS = "http://www.w3.org/2000/svg";
const PAD = { left: 68, right: 10, top: 10, bottom: 22 };

function shape(name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// `values` as a path, with a gap where one is null, and dots for those that stand alone.
function line(values, x, y, name) {
  let d = "";
  const dots = [];
  const at = (i) => values[i] ?? null;
  values.forEach((value, i) => {
    if (value === null) return;
    if (at(i - 1) === null && at(i + 1) === null) dots.push(shape("circle", { class: `dot-${name}`, cx: x(i), cy: y(value), r: 3 }));
    d += `${at(i - 1) === null ? "M" : "L"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return [shape("path", { class: `line-${name}`, d }), ...dots];
}

// The next of 1, 2 or 5 times a power of ten: a scale that is easily read and seldom changes.
export function scale(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}

// Draws `lines`, two arrays of numbers or nulls of the same length, into `svg`. `top` is the highest value of the scale;
// `format` writes a value, `ago(i)` says when step i was, `marks` are [step, text] under the time axis.
export function draw(svg, { lines, top, format, ago, marks, label, readout }) {
  const width = svg.clientWidth || 600, height = svg.clientHeight || 160;
  const steps = lines[0].length;
  const x = (i) => PAD.left + (steps < 2 ? 0 : (i / (steps - 1)) * (width - PAD.left - PAD.right));
  const y = (value) => height - PAD.bottom - (Math.min(value, top) / top) * (height - PAD.top - PAD.bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", label);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(share * top);
    parts.push(shape("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: at, y2: at }));
    parts.push(shape("text", { x: PAD.left - 8, y: at + 4, "text-anchor": "end" }, format(share * top)));
  }
  for (const [step, text] of marks) {
    const anchor = x(step) < PAD.left + 20 ? "start" : x(step) > width - 40 ? "end" : "middle";
    parts.push(shape("text", { x: x(step), y: height - 4, "text-anchor": anchor }, text));
  }
  parts.push(...line(lines[1], x, y, "b"), ...line(lines[0], x, y, "a"));
  if (lines.every((values) => values.every((value) => value === null))) {
    parts.push(shape("text", { class: "empty", x: (width + PAD.left) / 2, y: height / 2, "text-anchor": "middle" }, "Nothing asked for yet"));
  }
  const cursor = shape("line", { class: "cursor", y1: PAD.top, y2: height - PAD.bottom, visibility: "hidden" });
  svg.replaceChildren(...parts, cursor);
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const share = (event.clientX - box.left - PAD.left) / (width - PAD.left - PAD.right);
    const step = Math.max(0, Math.min(steps - 1, Math.round(share * (steps - 1))));
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    const values = lines.map((line) => (line[step] === null ? "–" : format(line[step])));
    readout.textContent = `${ago(step)}: ${values.join(", ")}`;
  };
  svg.onpointerleave = () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  };
}
