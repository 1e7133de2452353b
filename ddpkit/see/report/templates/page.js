"use strict";
(() => {
  const root = document.documentElement;
  root.classList.remove("no-script");

  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  document.querySelector(".theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });

  // A key of a legend hides its curve; a key of a run all curves of the run.
  const keys = [...document.querySelectorAll(".key[data-line]")];
  const show = (key, isShown) => {
    key.setAttribute("aria-pressed", String(isShown));
    const curve = document.getElementById(key.dataset.line);
    if (curve) curve.style.display = isShown ? "" : "none";
  };
  const isShown = (key) => key.getAttribute("aria-pressed") !== "false";
  for (const key of keys) key.addEventListener("click", () => show(key, !isShown(key)));
  for (const run of document.querySelectorAll(".key[data-all]")) {
    run.addEventListener("click", () => {
      const now = !isShown(run);
      run.setAttribute("aria-pressed", String(now));
      for (const key of keys) if (key.dataset.run === run.dataset.all) show(key, now);
    });
  }

  const digits = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2);
    return String(Number(value.toPrecision(size >= 1000 ? 5 : 3)));
  };
  const words = (value, unit) => {
    if (unit === "%") return digits(100 * value) + " %";
    if (unit === "s") {
      if (Math.abs(value) >= 1 || value === 0) return digits(value) + " s";
      return Math.abs(value) >= 1e-3 ? digits(1e3 * value) + " ms" : digits(1e6 * value) + " µs";
    }
    if (unit === "B") {
      const at = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.max(1, Math.abs(value))) / 3)));
      return digits(value / 1000 ** at) + " " + ["B", "kB", "MB", "GB", "TB"][at];
    }
    return digits(value);
  };

  // The points of a curve in the units of its picture, as matplotlib has drawn them.
  const pointsOf = (curve) => {
    const found = [];
    const path = curve.querySelector("path");
    for (const [, x, y] of (path?.getAttribute("d") ?? "").matchAll(/[ML] ?(-?[\d.]+) (-?[\d.]+)/g)) {
      found.push([Number(x), Number(y)]);
    }
    return found;
  };

  for (const figure of document.querySelectorAll("figure[data-box]")) {
    const plot = figure.querySelector(".plot");
    const [left, top, wide, high, width] = figure.dataset.box.split(" ").map(Number);
    const [x0, x1] = figure.dataset.x.split(" ").map(Number);
    const [y0, y1] = figure.dataset.y.split(" ").map(Number);
    const isLog = figure.dataset.log === "1";
    const isStack = figure.dataset.stack === "1";
    const own = [...figure.querySelectorAll(".key[data-line]")];
    let curves = null;

    const valueAt = (y) => {
      const share = 1 - (y - top) / high;
      return isLog ? Math.exp(Math.log(y0) + share * (Math.log(y1) - Math.log(y0))) : y0 + share * (y1 - y0);
    };
    const hair = document.createElement("div");
    hair.className = "hair";
    const tip = document.createElement("div");
    tip.className = "tip";
    for (const one of [hair, tip]) {
      one.hidden = true;
      plot.append(one);
    }

    const nearest = (points, x) => {
      let best = 0;
      for (let at = 1; at < points.length; at += 1) {
        if (Math.abs(points[at][0] - x) < Math.abs(points[best][0] - x)) best = at;
      }
      return points[best];
    };
    const told = (points, x) => {
      if (!isStack) {
        const [px, py] = nearest(points, x);
        return [px, valueAt(py)];
      }
      const half = Math.floor(points.length / 2); // the way back of an outline is its lower edge
      const upper = points.slice(0, half);
      const [px, py] = nearest(upper, x);
      const lower = nearest(points.slice(half), px);
      return [px, valueAt(py) - valueAt(lower[1])];
    };

    plot.addEventListener("pointermove", (event) => {
      curves ??= own.map((key) => [key, pointsOf(document.getElementById(key.dataset.line))]);
      const bounds = plot.querySelector("svg").getBoundingClientRect();
      const scale = bounds.width / width;
      const x = (event.clientX - bounds.left) / scale;
      const shown = curves.filter(([key, points]) => points.length && isShown(key));
      if (!shown.length || x < left - 8 || x > left + wide + 8) {
        hair.hidden = tip.hidden = true;
        return;
      }
      const rows = shown.map(([key, points]) => [key, ...told(points, x)]);
      rows.sort((one, other) => Math.abs(one[1] - x) - Math.abs(other[1] - x));
      const at = rows[0][1];
      const near = rows.filter((row) => Math.abs(row[1] - at) < 12);
      tip.replaceChildren();
      const head = document.createElement("div");
      head.className = "muted";
      head.textContent = figure.dataset.axis + " " + digits(Math.round(x0 + ((at - left) / wide) * (x1 - x0)));
      tip.append(head);
      for (const [key, , value] of near) {
        const row = document.createElement("div");
        row.textContent = key.textContent.trim() + ": " + words(value, figure.dataset.unit);
        tip.append(row);
      }
      hair.hidden = tip.hidden = false;
      hair.style.cssText = `left:${at * scale}px;top:${top * scale}px;height:${high * scale}px`;
      const isRight = at > left + wide / 2;
      tip.style.cssText = `top:${top * scale}px;` + (isRight ? `right:${bounds.width - at * scale + 8}px` : `left:${at * scale + 8}px`);
    });
    plot.addEventListener("pointerleave", () => {
      hair.hidden = tip.hidden = true;
    });
  }
})();
