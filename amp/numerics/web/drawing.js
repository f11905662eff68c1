// Charts in pixels of the page, so that letters have one size at every width.

const svgNames = "http://www.w3.org/2000/svg";
const figures = [];

class Chart {
  constructor(id, height, { left = 20, right = 20, top = 12, bottom = 52 } = {}) {
    this.svg = $(id);
    this.svg.replaceChildren();
    const width = Math.round(this.svg.getBoundingClientRect().width) || 720;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    Object.assign(this, { width, height, left, top, right: width - right, bottom: height - bottom });
  }

  add(tag, attributes, ...children) {
    const node = document.createElementNS(svgNames, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    this.svg.append(node);
    return node;
  }

  line(x1, y1, x2, y2, attributes = {}) {
    return this.add("line", { x1, y1, x2, y2, stroke: "var(--line)", ...attributes });
  }

  bar(x1, y1, x2, y2, attributes) {
    const [x, y] = [Math.min(x1, x2), Math.min(y1, y2)];
    return this.add("rect", { x, y, width: Math.abs(x2 - x1), height: Math.abs(y2 - y1), ...attributes });
  }

  // A text, in which 2^{-24} is a power; one that is centred stays inside of the chart.
  text(x, y, text, anchor = "start", look = "") {
    const parts = pieces(text).map((piece, i) => {
      const span = document.createElementNS(svgNames, "tspan");
      span.textContent = piece;
      span.setAttribute("dy", i % 2 ? "-0.4em" : i ? "0.32em" : "0");
      if (i % 2) span.setAttribute("class", "power");
      return span;
    });
    const node = this.add("text", { x, y, "text-anchor": anchor, class: look }, ...parts.filter((part) => part.textContent));
    if (anchor === "middle") {
      const half = node.getComputedTextLength() / 2;
      node.setAttribute("x", Math.min(Math.max(x, half), this.width - half));
    }
    return node;
  }

  // The horizontal axis of powers of 2: a tick for every so many as there is room for.
  powersBelow(at, low, high, title) {
    const room = Math.max(1, Math.floor((this.right - this.left) / 46));
    for (const power of ticks(low, high, room)) {
      this.line(at(power), this.bottom, at(power), this.bottom + 5, { stroke: "var(--edge)" });
      this.text(at(power), this.bottom + 22, minus(`2^{${power}}`), "middle", "dim");
    }
    this.titleBelow(title);
  }

  numbersBelow(at, low, high, title, whole = true) {
    const room = Math.max(1, Math.floor((this.right - this.left) / 46));
    for (const x of ticks(low, high, room, whole)) {
      this.line(at(x), this.bottom, at(x), this.bottom + 5, { stroke: "var(--edge)" });
      this.text(at(x), this.bottom + 22, shown(x), "middle", "dim");
    }
    this.titleBelow(title);
  }

  titleBelow(title) {
    this.line(this.left, this.bottom, this.right, this.bottom, { stroke: "var(--edge)" });
    this.text((this.left + this.right) / 2, this.bottom + 43, title, "middle");
  }

  // The vertical axis: lines across, labels at the left, and what they count above.
  axisLeft(y, low, high, title, label, whole = true) {
    const room = Math.max(2, Math.floor((this.bottom - this.top) / 26));
    for (const value of ticks(low, high, room, whole)) {
      this.line(this.left, y(value), this.right, y(value));
      this.text(this.left - 8, y(value) + 4, label(value), "end", "dim");
    }
    this.text(0, 12, title);
  }
}

// Round numbers from low to high, at most so many.
function ticks(low, high, most, whole = true) {
  for (let unit = whole ? 1 : 10 ** Math.floor(Math.log10((high - low) / most)); ; unit *= 10) {
    for (const step of [unit, 2 * unit, ...(unit > 1 || !whole ? [2.5 * unit] : []), 5 * unit]) {
      const first = Math.ceil(low / step);
      const count = Math.floor(high / step) - first + 1;
      if (count <= most) return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(12)));
    }
  }
}

const isNarrow = (id) => $(id).getBoundingClientRect().width < 560;

// A map from numbers to pixels, which ends where the chart does.
function linear([low, high], [from, to]) {
  return (x) => from + ((Math.min(Math.max(x, low), high) - low) / (high - low)) * (to - from);
}

function register(show) {
  figures.push(show);
  show();
}

// The fonts and the width decide where things are.
function redrawOnResize() {
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    for (const show of figures) show();
  });
}
