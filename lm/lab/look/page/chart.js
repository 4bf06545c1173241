// A chart of curves in SVG, with a cursor that the pointer or the arrow keys move.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const FRAME = { height: 260, left: 46, right: 12, top: 26, bottom: 38 };

function shape(tag, { style = {}, ...attributes }, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.assign(element.style, style);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  element.textContent = text;
  return element;
}

const lowest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const highest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// Return round values from low to high, about six of them.
function ticks(low, high) {
  const raw = (high - low) / 6 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const n = Math.max(0, Math.floor(high / step + 1e-9) - first + 1);
  return Array.from({ length: n }, (_, i) => (first + i) * step);
}

// curves: {name, dashes, points: [[tokens, loss]]}, with points.
function chart(curves, { id, title, y, width }) {
  const { height, left, right, top, bottom } = FRAME;
  const all = curves.flatMap(({ points }) => points);
  const end = highest(all.map(([tokens]) => tokens));
  const late = all.filter(([tokens]) => tokens >= end / 10).map(([, loss]) => loss); // the first losses lie far above
  const [low, high] = [lowest(late), highest(late)];
  const atX = (tokens) => left + ((width - left - right) * tokens) / (end || 1);
  const atY = (loss) => height - bottom - ((height - top - bottom) * (Math.min(loss, high) - low)) / (high - low || 1);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const write = (x, y, anchor, text) => svg.append(shape("text", { x, y, "text-anchor": anchor }, text));
  for (const tokens of ticks(0, end)) write(atX(tokens), height - bottom + 15, "middle", compact.format(tokens));
  const losses = ticks(low, high);
  const digits = losses.length > 1 ? Math.max(0, Math.ceil(-Math.log10(losses[1] - losses[0]) - 1e-9)) : 2;
  for (const loss of losses) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: atY(loss), y2: atY(loss) }));
    write(left - 5, atY(loss) + 4, "end", fixed(loss, digits));
  }
  write(left, 14, "start", y);
  write(width - right, height - 4, "end", "training tokens");
  for (const { name, dashes, points } of curves) {
    const places = points.map(([tokens, loss]) => [atX(tokens), atY(loss)]);
    const stroke = { stroke: colorOf(name), fill: "none" };
    if (points.length === 1) svg.append(shape("circle", { cx: places[0][0], cy: places[0][1], r: 2.2, style: stroke }));
    const dash = { "stroke-width": 1.8, "stroke-dasharray": DASHES[dashes] };
    svg.append(shape("polyline", { points: places.join(" "), style: stroke, ...dash }));
  }
  const box = el("div", { id, className: "chart", tabIndex: 0 }, svg);
  addCursor(box, svg, curves, atX, width);
  return box;
}

function addCursor(box, svg, curves, atX, width) {
  const stops = [...new Set(curves.flatMap(({ points }) => points.map(([tokens]) => tokens)))].sort((a, b) => a - b);
  const line = shape("line", { class: "grid", y1: FRAME.top, y2: FRAME.height - FRAME.bottom, x1: -1, x2: -1 });
  const tip = el("div", { className: "tip", hidden: true });
  let here = stops.length - 1;
  svg.prepend(line);
  box.append(tip);
  const nearest = (list, distance) => list.reduce((best, item) => (distance(item) < distance(best) ? item : best));
  const point = (index) => {
    here = Math.max(0, Math.min(stops.length - 1, index));
    const tokens = stops[here];
    ["x1", "x2"].forEach((end) => line.setAttribute(end, atX(tokens)));
    const values = curves
      .filter(({ points }) => tokens <= points.at(-1)[0])
      .map(({ name, points }) => [name, nearest(points, (item) => Math.abs(item[0] - tokens))[1]])
      .sort((a, b) => b[1] - a[1])
      .slice(-12);
    const row = ([name, loss]) => el("div", {}, el("span", {}, swatch(name), short(name)), fixed(loss));
    tip.replaceChildren(`${compact.format(tokens)} tokens`, ...values.map(row));
    const share = (100 * atX(tokens)) / width;
    const isLeft = share < 50;
    tip.style.left = isLeft ? `calc(${share}% + 8px)` : "";
    tip.style.right = isLeft ? "" : `calc(${100 - share}% + 8px)`;
    tip.hidden = false;
  };
  box.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect();
    const x = ((event.clientX - area.left) / area.width) * width;
    point(stops.indexOf(nearest(stops, (stop) => Math.abs(atX(stop) - x))));
  });
  box.addEventListener("focus", () => point(here));
  ["pointerleave", "blur"].forEach((name) => box.addEventListener(name, () => { tip.hidden = true; }));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    point(here + step);
    event.preventDefault();
  });
}
